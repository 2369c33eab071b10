"""One tensor in a notebook: what MXFP4 does to it, which component of the error, and what would mend it.

No run and no symptom: the gate is the tensor's own normalised error (`Thresholds.clean_nmse`), and a gain is that of
this tensor, measured whole. The verdict about a run is `mxprobe recommend`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from mxprobe.attribution import ratios, words
from mxprobe.attribution.gaussian import gaussian_reference
from mxprobe.attribution.tensor import judge_tensor
from mxprobe.attribution.thresholds import Thresholds
from mxprobe.numbers import number, percent
from mxprobe.schema import Component, Rule
from mxprobe_kernels.recipe_grammar import CHANNEL_WHATIFS, DEFAULT_WHATIFS

if TYPE_CHECKING:
    import torch

NONE, UNDECIDED = "none", "undecided"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. Shows itself as a table in a notebook, and in words when printed."""

    rule: str
    shape: tuple[int, ...]
    n_nonfinite: int
    """Elements that are NaN or infinite; their blocks are left out."""
    nmse: float
    """||Q(x) - x||^2 / ||x||^2"""
    sqnr_db: float
    gaussian_sqnr_db: float
    """The SQNR that a Gaussian tensor of the same rms would have."""
    zero_frac: float
    gaussian_zero_frac: float
    component: Component
    shares: dict[str, float]
    """Remainder split `scale` + `deadzone` + `grid` = 1, and the realised split's `zeroed` and `saturated`."""
    correction: str
    """The correction to enable; `none` if nothing is needed, `undecided` if several are as good at different cost."""
    candidates: tuple[str, ...]
    """The corrections it is undecided between, the favourite first; the one named; or none."""
    whatifs: pd.DataFrame
    """Per correction `gain` (part of the error energy removed, negative when it does harm), `recovery` (of the
    named component), `cost_gemm`, `bits_per_element`, `is_eligible`; the largest gain first."""

    @property
    def summary(self) -> str:
        """Two sentences."""
        if self.component is Component.NONE:
            level = f"{number(self.nmse)} of the energy ({self.sqnr_db:.1f} dB)"
            return f"Clean: the error is {level}. No correction needed."
        named = ", ".join(words.correction_words(name) for name in self.candidates)
        advice = f"undecided between {named}" if self.correction == UNDECIDED else named
        return (
            f"{words.sentence(words.COMPONENT_WORDS[self.component])}: {self.sqnr_db:.1f} dB, a Gaussian tensor of "
            f"this size has {self.gaussian_sqnr_db:.1f}. Correction: {advice}."
        )

    def __str__(self) -> str:
        lines = [self.summary, "", *(f"{name:<12}{value}" for name, value in self._facts())]
        if not self.whatifs.empty:
            lines += ["", self.whatifs.to_string(index=False, float_format=lambda value: f"{value:.3f}")]
        return "\n".join(lines)

    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("rule", self.rule),
            ("NMSE", number(self.nmse)),
            ("zeroed", f"{percent(self.zero_frac)} (Gaussian {percent(self.gaussian_zero_frac)})"),
        ]
        facts += [(name, percent(self.shares[name])) for name in ("scale", "deadzone", "grid", "saturated")]
        if self.n_nonfinite:
            facts.append(("non-finite", str(self.n_nonfinite)))
        return facts

    def _repr_html_(self) -> str:
        facts = "".join(
            f"<tr><th scope='row' style='text-align:left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        table = "" if self.whatifs.empty else self.whatifs.to_html(index=False, float_format="{:.3f}".format, border=0)
        return f"<p><b>mxprobe</b> {html.escape(self.summary)}</p><table>{facts}</table>{table}"


def diagnose(
    x: torch.Tensor,
    *,
    rule: str = "rceil",
    dim: int = -1,
    corrections: Sequence[str] = (*DEFAULT_WHATIFS, *CHANNEL_WHATIFS),
    thresholds: Thresholds | None = None,
) -> Diagnosis:
    """Decompose the MXFP4 error of one tensor and score corrections on it.

    Args:
        x: float32, bfloat16, float16 or float64, any shape; or what `torch.as_tensor` takes.
        rule: scale rule of the quantizer, see `mxprobe_kernels.formats.Rule`.
        dim: the contraction axis of the GEMM that consumes x, along which blocks of 32 run.
        corrections: spelled as in what-ifs, e.g. `mbs:128`, `of:0.5`.
        thresholds: gates to use in place of the defaults.

    Raises:
        ValueError: unknown rule or correction, or a tensor that has no such axis or is not floating point.
    """
    import torch

    from mxprobe_kernels import apply_correction, error_fields

    x = torch.as_tensor(x).detach()
    fields = error_fields(x, rule=rule, dim=dim)
    sums = fields.decomposition().to_dict()
    after: dict[str, dict[str, Any]] = {}
    for correction in corrections:
        # Blocks with a NaN come back as NaN; they are left out here as in the decomposition.
        corrected = apply_correction(x, correction, rule=rule, dim=dim).double()
        left = torch.where(corrected.isfinite(), corrected - fields.x, 0.0).square()
        after[correction] = {"sum_e2": float(left.sum()), "sum_e2_on_d": float((left * fields.on_d).sum())}
    judged = judge_tensor(sums, after, thresholds)
    values = ratios.tensor_ratios(sums).iloc[0]
    gaussian = gaussian_reference(float(values["log2_rms"]), Rule(rule))
    columns = ("correction", "gain", "recovery", "cost_gemm", "bits_per_element", "is_eligible")
    whatifs = pd.DataFrame([{name: getattr(score, name) for name in columns} for score in judged.scores])
    return Diagnosis(
        rule=Rule(rule).value,
        shape=tuple(x.shape),
        n_nonfinite=int(sums["n_nonfinite"]),
        nmse=judged.nmse,
        sqnr_db=float(values["sqnr_db"]),
        gaussian_sqnr_db=gaussian.sqnr_db,
        zero_frac=float(values["zero_frac"]),
        gaussian_zero_frac=gaussian.zero_frac,
        component=judged.component,
        shares=judged.shares,
        correction=NONE if not judged.chosen else judged.chosen[0] if len(judged.chosen) == 1 else UNDECIDED,
        candidates=judged.chosen,
        whatifs=whatifs if whatifs.empty else whatifs.sort_values("gain", ascending=False, ignore_index=True),
    )
