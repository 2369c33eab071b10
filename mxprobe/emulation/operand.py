"""What is done to one operand of a GEMM: format, scale rule, corrections. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from mxprobe.errors import UsageError
from mxprobe_kernels.formats import FORMATS, Correction, CorrectionKind, Rule, ScaleType, get_rule

NONE = "none"
_FLAGS = {"sr": "stochastic", "2d": "square", "as_forward": "as_forward"}
_SPELLING = "FORMAT[/RULE][+mbs:B|+had:N][+of:ALPHA][+sr][+2d][+as_forward], e.g. mxfp4/rceil+of:0.5, or none"


@dataclass(frozen=True)
class Operand:
    """How one operand is quantized before its GEMM. The default leaves it in high precision.

    Raises UsageError for a combination that means nothing, e.g. a correction of a format other than MXFP4.
    """

    format: str = NONE
    """`none`, or a name of `mxprobe_kernels.formats.FORMATS`."""
    rule: Rule = Rule.RCEIL
    """Scale rule of power-of-two scales; other scale types have none."""
    corrections: tuple[Correction, ...] = ()
    """Of MXFP4: at most one of `mbs:B` and `had:N`, then at most one `of:alpha` on top of it."""
    stochastic: bool = False
    """Stochastic rounding: up with the probability that makes it unbiased below saturation."""
    square: bool = False
    """Two-dimensional blocks of B x B elements: the same values whichever GEMM consumes them."""
    as_forward: bool = False
    """Backward roles of X and W only: blocks run along in-features, as in the forward GEMM, not along this GEMM's
    contraction axis. It is what straight-through fake quantization computes (one Q(W), used twice)."""

    def __post_init__(self) -> None:
        if self.format == NONE:
            if self.rule is not Rule.RCEIL or self.corrections or self.stochastic or self.square or self.as_forward:
                raise _refusal(self, "an operand in high precision takes no rule and no correction")
            return
        if self.format not in FORMATS:
            raise _refusal(self, f"unknown format {self.format!r}; known: {NONE}, {', '.join(sorted(FORMATS))}")
        has_powers_of_two = FORMATS[self.format].scale is ScaleType.E8M0
        if self.corrections and self.format != "mxfp4":
            raise _refusal(self, f"corrections are defined for mxfp4, not for {self.format}")
        if (self.stochastic or self.square) and not has_powers_of_two:
            raise _refusal(self, f"stochastic rounding and 2-D blocks need power-of-two scales; {self.format} has none")
        if self.corrections and (self.stochastic or self.square):
            raise _refusal(self, "stochastic rounding and 2-D blocks do not combine with mbs, had or of")
        kinds = [correction.kind for correction in self.corrections]
        allowed = (CorrectionKind.MACRO_BLOCK_SCALING, CorrectionKind.HADAMARD, CorrectionKind.OUTLIER_FALLBACK)
        if any(kind not in allowed for kind in kinds):
            raise _refusal(self, "only mbs:B, had:N and of:ALPHA are corrections here; a rule is spelled mxfp4/RULE")
        if CorrectionKind.OUTLIER_FALLBACK in kinds[:-1] or len(kinds) - kinds.count(allowed[2]) > 1:
            raise _refusal(self, "at most one of mbs and had, then at most one of:ALPHA")

    @classmethod
    def parse(cls, text: str) -> Operand:
        """`mxfp4`, `mxfp4/floor`, `mxfp4/rceil+mbs:128+of:0.5`, `mxfp8+sr`, `none`. UsageError says what is wrong."""
        return _parse(text.strip())

    def corrected(self, correction: Correction | str) -> Operand:
        """This operand with one correction of `mxprobe recommend` switched on.

        Rule changes and other formats replace; `mbs`, `had` and `of` join what is there, in place of their like.
        """
        if isinstance(correction, str):
            correction = _correction(correction, correction)
        kind = correction.kind
        if kind is CorrectionKind.KEEP_HIGH_PRECISION:
            return Operand()
        if correction.format is not None:
            rule = self.rule if correction.keeps_format else Rule.RCEIL
            return Operand(correction.format.name, rule, as_forward=self.as_forward)
        plain = self if self.format == "mxfp4" else Operand("mxfp4", self.rule, as_forward=self.as_forward)
        if kind is CorrectionKind.RULE:
            return replace(plain, rule=get_rule(str(correction.parameter)))
        on_top = CorrectionKind.OUTLIER_FALLBACK
        kept = [c for c in plain.corrections if (c.kind is on_top) != (kind is on_top)]
        both = [correction, *kept] if kind is not on_top else [*kept, correction]
        return replace(plain, corrections=tuple(both))

    @property
    def is_high_precision(self) -> bool:
        return self.format == NONE

    def __str__(self) -> str:
        if self.is_high_precision:
            return NONE
        rule = f"/{self.rule}" if FORMATS[self.format].scale is ScaleType.E8M0 else ""
        flags = [flag for flag, field in _FLAGS.items() if getattr(self, field)]
        return "+".join([self.format + rule, *map(str, self.corrections), *flags])


HIGH_PRECISION = Operand()


@cache
def _parse(text: str) -> Operand:
    head, *modifiers = text.split("+")
    format, slash, rule = head.partition("/")
    try:
        scale_rule = get_rule(rule) if slash else Rule.RCEIL
    except ValueError as error:
        raise _bad(text, str(error)) from None
    if slash and format in FORMATS and FORMATS[format].scale is not ScaleType.E8M0:
        raise _bad(text, f"{format} has no power-of-two scales, so no scale rule")
    flags = {_FLAGS[modifier]: True for modifier in modifiers if modifier in _FLAGS}
    corrections = tuple(_correction(modifier, text) for modifier in modifiers if modifier not in _FLAGS)
    return Operand(format, scale_rule, corrections, **flags)


def _correction(text: str, whole: str) -> Correction:
    try:
        return Correction.parse(text)
    except ValueError as error:
        raise _bad(whole, str(error)) from None


def _bad(text: str, why: str) -> UsageError:
    return UsageError(f"cannot read the operand {text!r}: {why}", remedy=f"spell it {_SPELLING}")


def _refusal(operand: Operand, why: str) -> UsageError:
    parts = [operand.format, *map(str, operand.corrections), *(f for f, n in _FLAGS.items() if getattr(operand, n))]
    return _bad("+".join(parts), why)
