"""The outcome of `mxprobe recommend`, as plain data. `docs/recommend-json.md` documents its JSON."""

import html
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mxprobe.numbers import fixed
from mxprobe.plain_data import plain_data
from mxprobe.schema import PLAIN_WORDS, Component, Role, Verdict

from .exclusion import ExclusionCurve
from .thresholds import Thresholds
from .update_visibility import UpdateVisibility

JSON_SCHEMA = "mxprobe.recommend/1"


class Certainty(StrEnum):
    """How a number came about; the three are never mixed up in words."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    ASSOCIATED = "associated with"


@dataclass(frozen=True)
class Evidence:
    """One fact the verdict rests on. `holds` says which way it speaks where there is a threshold."""

    name: str
    certainty: Certainty
    text: str
    value: float | None = None
    threshold: float | None = None
    holds: bool | None = None


@dataclass(frozen=True)
class OperandGroup:
    """Operands of one role in modules of one kind, e.g. the inputs (x_fwd) of every q_proj."""

    role: Role
    module_kind: str
    modules: tuple[str, ...]
    output_error: float
    """Mean over the modules of ||GEMM output error||^2 / ||output||^2, this operand quantized."""
    component: Component
    shares: dict[str, float]
    """Shares of the output error: `zeroed` and `saturated` (made on such elements), and the remainder split
    `scale` + `deadzone` + `grid` = 1."""


@dataclass(frozen=True)
class CorrectionScore:
    """One correction, measured on the named operands."""

    correction: str
    tier: int
    """1 keeps the format, 2 leaves it."""
    gain: float
    """Part of the output error removed; negative when it does harm."""
    gain_low: float
    gain_high: float
    """The 95 % interval of the gain (t, over probed steps)."""
    n_steps: int
    held_out_gain: float | None
    """Gain on the half of the steps that did not choose; None when there are too few."""
    recovery: float
    """Part of the named component mended, in the GEMM's output."""
    tensor_recovery: float | None
    """The same on the tensor itself, where the trace can tell."""
    cost_gemm: float
    """Extra GEMM time, in FP4 passes of the GEMM it is applied to. Estimated from the device's rates, see `costs`."""
    bits_per_element: float
    cures: bool | None
    """Whether the predicted symptom falls under its gate; None when there is no symptom to cure."""
    is_active: bool
    """Already on in this run: gains are relative to it."""
    is_eligible: bool
    """Gain, its lower bound and the recovery all pass their thresholds."""
    note: str = ""
    engine_has_it: bool | None = None
    """Whether the framework of the snippet has an option for it; None where no framework is in question."""
    is_pareto: bool = False
    """No other correction of the list gains as much at less cost, or more at the same."""


@dataclass(frozen=True)
class Agreement:
    """Resample agreement: the share of bootstrap resamples of the probed steps with the same decision."""

    value: float | None
    n: int
    """Probed steps."""
    n_resamples: int


@dataclass(frozen=True)
class Coverage:
    """How much of the forward work of weight GEMMs the probe has seen."""

    flops_frac: float | None
    """Share of forward GEMM FLOPs in probed modules; None when no module is known."""
    n_probed: int
    n_modules: int
    not_seen: tuple[tuple[str, str], ...]
    """(module, reason) of modules with weight GEMMs that were not probed, the heaviest first."""

    @property
    def because(self) -> str:
        """Why nothing was covered, the reason of the heaviest module; "" where something was."""
        return self.not_seen[0][1].partition("; its FLOPs")[0] if self.flops_frac == 0.0 and self.not_seen else ""


@dataclass(frozen=True)
class Snippet:
    """Code that enables the first correction."""

    framework: str
    language: str
    text: str


@dataclass(frozen=True)
class PaperColumn:
    """What a neighbouring paper measures: median, 10 % and 90 % quantile over `n` operands; None where withheld."""

    name: str
    definition: str
    source: str
    unit: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    largest: str = ""
    """Where the value is largest."""
    withheld: str = ""
    """Why there is no value; "" where there is one."""


@dataclass(frozen=True)
class Recommendation:
    """Verdict, reasons and what to switch on."""

    verdict: Verdict
    headline: str
    component: Component
    shares: dict[str, float]
    """Shares of output error over all quantized forward operands, as in `OperandGroup.shares`."""
    where: tuple[OperandGroup, ...]
    chosen: tuple[str, ...]
    """Corrections to enable; several when undecided, the favourite first; empty when none."""
    corrections: tuple[CorrectionScore, ...]
    """All scored ones: the chosen first, then by gain."""
    evidence: tuple[Evidence, ...]
    agreement: Agreement
    coverage: Coverage
    thresholds: Thresholds
    what_would_change: str
    snippet: Snippet | None
    caveats: tuple[str, ...]
    exclusion: tuple[ExclusionCurve, ...] = ()
    """What keeping modules out of MXFP4 would buy, in BF16 and in MXFP8; empty without sensitivities."""
    updates: UpdateVisibility | None = None
    """Whether the optimizer's updates reach the quantized weights."""
    neighbours: tuple[PaperColumn, ...] = ()
    """What neighbouring papers measure, where it was asked for. The verdict does not use it."""

    @property
    def plain_words(self) -> str:
        return PLAIN_WORDS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: enums as strings, numbers that are not finite as null."""
        data: dict[str, Any] = plain_data(self)
        data["where"] = {"groups": [{"kind": group.pop("module_kind"), **group} for group in data["where"]]}
        for score in data["corrections"]:
            score["named"] = score["correction"] in self.chosen
        return {"schema": JSON_SCHEMA, "verdict": data.pop("verdict"), "plain_words": self.plain_words, **data}

    def _repr_html_(self) -> str:
        """For notebooks: the headline, what is named and how sure that is."""
        agreement = "unknown" if self.agreement.value is None else f"{fixed(self.agreement.value)}"
        rows = "".join(
            f"<tr><td>{html.escape(score.correction)}</td><td>{fixed(score.gain)}</td>"
            f"<td>[{fixed(score.gain_low)}, {fixed(score.gain_high)}]</td><td>{score.cost_gemm:g}</td></tr>"
            for score in self.corrections
            if score.correction in self.chosen
        )
        head = "<tr><th>enable</th><th>gain</th><th>95 %</th><th>extra GEMM passes</th></tr>"
        return (
            f"<p><b>{html.escape(self.plain_words)}</b>: {html.escape(self.headline)}</p>"
            f"<p>resample agreement {agreement} (n = {self.agreement.n})</p>"
            + (f"<table>{head}{rows}</table>" if rows else "")
            + f"<p>What would change this: {html.escape(self.what_would_change)}</p>"
        )
