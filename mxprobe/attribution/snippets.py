"""Code that switches a correction on: a framework's own knob where it has one, else plain PyTorch.

The PyTorch code is self-contained emulation: it gives the named Linears a forward that quantizes the same operands
as the run, with scales by `rceil`, and corrects the named ones. It shows the effect, not the speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from textwrap import indent, wrap

from mxprobe.errors import UsageError
from mxprobe.schema import Role
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from .knobs import SAME_AS, WHERE_TO_CALL, knob_for
from .recommendation import OperandGroup, Snippet
from .words import correction_words, listed, place, sentence

TORCH_FRAMEWORKS = ("trl", "transformers", "torch", "torchao")
FRAMEWORKS = (*TORCH_FRAMEWORKS, "verl", "nemo-rl", "openrlhf", "alto", "megatron", *SAME_AS)


@dataclass(frozen=True)
class Emulated:
    """Which sides the run quantizes already, and whether in generation only."""

    x: bool = True
    w: bool = True
    rollout_only: bool = False


def snippet_for(correction: str, where: Sequence[OperandGroup], framework: str, emulated: Emulated) -> Snippet:
    """Return the snippet for a correction on the named operands.

    Raises:
        UsageError: unknown framework.
    """
    if framework not in FRAMEWORKS:
        raise UsageError(f"no snippets for framework {framework!r}", remedy=f"use one of: {', '.join(FRAMEWORKS)}")
    parsed = Correction.parse(correction)
    kinds = sorted({group.module_kind for group in where})
    knob = knob_for(framework, parsed, kinds)
    if knob is not None:
        language, text, patterns = knob
        return Snippet(framework, language, _fill(text, {"patterns": patterns}))
    title = _comment(f"{sentence(correction_words(correction))} on {place(where)}.")
    note = (
        ""
        if framework in TORCH_FRAMEWORKS
        else f"# {framework} has no option for this; the same in plain PyTorch.\n{WHERE_TO_CALL.get(framework, '')}"
    )
    if parsed.kind in _TORCHAO:
        config = _torchao_config(parsed)
        if config:
            body = _filled("torchao", {"kinds": repr(tuple(kinds)), "config": config})
            return Snippet(framework, "python", f"{title}{note}{body}")
    if parsed.kind is CorrectionKind.KEEP_HIGH_PRECISION:
        body = _filled("keep", {"kinds": repr(tuple(kinds))})
        return Snippet(framework, "python", f"{_comment(f'Keep {listed(kinds)} in high precision.')}{note}{body}")
    values = {
        "sides": "".join(f"    {kind!r}: {sides!r},\n" for kind, sides in _sides(where).items()),
        "quantized": repr("".join(side for side, on in (("x", emulated.x), ("w", emulated.w)) if on)),
        "rollout_only": repr(emulated.rollout_only),
        "corrected": _filled(
            parsed.kind.value if parsed.kind in _WRITTEN_OUT else "by_kernel",
            {"parameter": str(parsed.parameter or parsed)},
        ),
    }
    return Snippet(framework, "python", f"{title}{note}{_filled('torch', values)}")


def has_option(correction: str, framework: str) -> bool:
    """Whether the framework, or torchao under plain PyTorch, has an option for it; else it is emulated by hand."""
    parsed = Correction.parse(correction)
    if framework in TORCH_FRAMEWORKS:
        if parsed.kind is CorrectionKind.KEEP_HIGH_PRECISION:
            return True
        return parsed.kind in _TORCHAO and parsed.parameter is not Rule.FLOOR_DIV
    return knob_for(framework, parsed, ()) is not None


def _comment(text: str) -> str:
    return indent("\n".join(wrap(text, 110)), "# ") + "\n"


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return the template of that name in `snippet_templates` with its values."""
    return _fill(
        (files("mxprobe.attribution") / "snippet_templates" / f"{template}.txt").read_text(encoding="utf-8"), values
    )


def _fill(text: str, values: Mapping[str, str]) -> str:
    return Template(text).substitute(values).strip() + "\n"


def _sides(where: Sequence[OperandGroup]) -> dict[str, str]:
    letters = {Role.X_FWD: "x", Role.W_FWD: "w"}
    sides: dict[str, str] = {}
    for group in where:
        sides[group.module_kind] = sides.get(group.module_kind, "") + letters.get(group.role, "")
    return sides


_WRITTEN_OUT = (CorrectionKind.OUTLIER_FALLBACK, CorrectionKind.MACRO_BLOCK_SCALING, CorrectionKind.HADAMARD)
"""Corrections whose arithmetic the snippet spells out; the others are called by name."""
_TORCHAO = (CorrectionKind.RULE, CorrectionKind.NVFP4, CorrectionKind.MXFP8)
# `floor_div` is a bug's signature and never recommended; `oas` differs from `even` at an exact tie only.
_TORCHAO_MODES = {Rule.RCEIL: "RCEIL", Rule.FLOOR: "FLOOR", Rule.CEIL: "CEIL", Rule.EVEN: "EVEN", Rule.OAS: "EVEN"}


def _torchao_config(parsed: Correction) -> str:
    if parsed.kind is CorrectionKind.NVFP4:
        return "NVFP4FakeQuantizeConfig()"
    if parsed.kind is CorrectionKind.MXFP8:
        return "MXFakeQuantizeConfig(dtype=torch.float8_e4m3fn)"
    mode = _TORCHAO_MODES[Rule(str(parsed.parameter))]
    return f"MXFakeQuantizeConfig(scaling_mode=ScaleCalculationMode.{mode})"
