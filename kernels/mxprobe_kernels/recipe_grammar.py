"""The one grammar of corrections and recipes: how an operand is quantized, as one record with three spellings.

    as a correction   rule:floor    of:0.5              nvfp4   keep_high_precision   what a what-if changes of MXFP4
    as inferred       mxfp4+floor   mxfp4+of:0.5        nvfp4   none                  columns recipe_x and recipe_w
    in full           mxfp4/floor   mxfp4/rceil+of:0.5  nvfp4   none                  an operand of an emulated recipe

`Operand.parse` reads all three; `Operand.correction`, `Operand.inferred` and `str` print them. Standard library only
and Python 3.9 syntax, because the agent ships this file into the attached process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from mxprobe_kernels.formats import FORMATS, MXFP4, Format, Name, Rule, ScaleType, get_rule

NONE = "none"
"""The name of the format that leaves an operand in high precision."""
SPELLING = "FORMAT[/RULE][+mbs:B|+had:N][+of:ALPHA][+sr][+2d][+as_forward], e.g. mxfp4/rceil+of:0.5, or none"


class CorrectionKind(Name):
    RULE = "rule"
    """Another scale rule: `rule:even`."""
    MACRO_BLOCK_SCALING = "mbs"
    """An 8-bit mantissa shared by B elements: `mbs:128`."""
    OUTLIER_FALLBACK = "of"
    """A second pass on the residual, weighted by alpha: `of:0.5`."""
    HADAMARD = "had"
    """Random Hadamard rotation of that size before quantizing: `had:32`."""
    CHANNEL_RESIDUAL = "channels"
    """A second pass on the residual of the channels with most error, so many percent of them: `channels:5`."""
    STOCHASTIC = "sr"
    """Stochastic rounding, of a private seed."""
    NVFP4 = "nvfp4"
    NVFP4_4OVER6 = "nvfp4_4over6"
    MXFP4_4OVER6 = "mxfp4_4over6"
    """Still MXFP4: each block's scale is the rule's or `floor`'s, whichever leaves less error."""
    HIF4 = "hif4"
    MXFP6_E2M3 = "mxfp6_e2m3"
    MXFP6_E3M2 = "mxfp6_e3m2"
    MXFP8 = "mxfp8"
    KEEP_HIGH_PRECISION = "keep_high_precision"


_PARAMETRIC = {
    CorrectionKind.RULE,
    CorrectionKind.MACRO_BLOCK_SCALING,
    CorrectionKind.OUTLIER_FALLBACK,
    CorrectionKind.HADAMARD,
    CorrectionKind.CHANNEL_RESIDUAL,
}
_FRACTIONAL = {CorrectionKind.OUTLIER_FALLBACK, CorrectionKind.CHANNEL_RESIDUAL}


@dataclass(frozen=True)
class Correction:
    """One change of how MXFP4 quantizes. ValueError for a parameter that its kind cannot take."""

    kind: CorrectionKind
    parameter: float | int | Rule | None = None

    def __post_init__(self) -> None:
        kind, number, size = self.kind, self.number, self.size
        if kind is CorrectionKind.MACRO_BLOCK_SCALING and (size <= 0 or size % MXFP4.block):
            raise ValueError(f"correction {self}: the block must be a positive multiple of {MXFP4.block}")
        if kind is CorrectionKind.HADAMARD and (size < 2 or size & (size - 1)):
            raise ValueError(f"correction {self}: the size of a Hadamard rotation must be a power of two, at least 2")
        if kind is CorrectionKind.CHANNEL_RESIDUAL and not 0.0 < number <= 100.0:
            raise ValueError(f"correction {self}: the percentage of channels must be above 0 and at most 100")

    @classmethod
    def parse(cls, text: str) -> Correction:
        """Parse `rule:even`, `mbs:128`, `of:0.5`, `had:32`, `nvfp4`, ...; ValueError says what is wrong."""
        name, colon, value = text.partition(":")
        try:
            kind = CorrectionKind(name)
        except ValueError:
            known = ", ".join(k.value + (":…" if k in _PARAMETRIC else "") for k in CorrectionKind)
            raise ValueError(f"unknown correction {text!r}; known: {known}") from None
        if (kind in _PARAMETRIC) != bool(colon):
            wants = "takes a parameter" if kind in _PARAMETRIC else "takes no parameter"
            raise ValueError(f"correction {text!r}: {name} {wants}")
        if not colon:
            return cls(kind)
        if kind is CorrectionKind.RULE:
            return cls(kind, get_rule(value))
        try:
            number: int | float = float(value) if kind in _FRACTIONAL else int(value)
        except ValueError:
            raise ValueError(f"correction {text!r}: {value!r} is not a number") from None
        if number <= 0:
            raise ValueError(f"correction {text!r}: the parameter must be positive")
        return cls(kind, number)

    def __str__(self) -> str:
        if self.parameter is None:
            return self.kind.value
        number = f"{self.number:g}" if self.kind is CorrectionKind.CHANNEL_RESIDUAL else self.parameter
        return f"{self.kind}:{number}"

    @property
    def number(self) -> float:
        """The parameter of a kind that takes a number, else 0."""
        return float(self.parameter) if isinstance(self.parameter, (int, float)) else 0.0

    @property
    def size(self) -> int:
        """The parameter of a kind that counts elements (B in `mbs:B`, N in `had:N`), else 0."""
        return self.parameter if isinstance(self.parameter, int) else 0

    @property
    def keeps_format(self) -> bool:
        """True where the result is still MXFP4 elements with power-of-two block scales."""
        return self.kind in _PARAMETRIC or self.kind in (CorrectionKind.MXFP4_4OVER6, CorrectionKind.STOCHASTIC)

    @property
    def format(self) -> Format | None:
        """The format that this correction switches to; None where it changes MXFP4's, or quantizes nothing."""
        return FORMATS.get(self.kind.value)

    @property
    def needs_whole_tensor(self) -> bool:
        """As `Operand.needs_whole_tensor`, of MXFP4 with this correction."""
        return Operand.from_correction(self).needs_whole_tensor


DEFAULT_WHATIFS: tuple[str, ...] = (
    "rule:floor",
    "rule:even",
    "rule:ceil",
    "mbs:32",
    "mbs:64",
    "mbs:128",
    "of:0.5",
    "of:1.0",
    "had:32",
    "nvfp4",
    "nvfp4_4over6",
    "hif4",
    "mxfp6_e2m3",
    "mxfp8",
)
"""The corrections that a probed step scores on the tensors at hand."""

CHANNEL_WHATIFS: tuple[str, ...] = ("channels:1", "channels:5", "channels:10")
"""Scored beside them, never named: no engine has it as an option yet."""

_FLAGS = {"sr": "stochastic", "2d": "square", "as_forward": "as_forward"}
_PLACES = {
    CorrectionKind.MACRO_BLOCK_SCALING: 0,
    CorrectionKind.HADAMARD: 0,
    CorrectionKind.OUTLIER_FALLBACK: 1,
    CorrectionKind.CHANNEL_RESIDUAL: 2,
}
"""Corrections that join others in an operand, by their place: `of` goes on top of `mbs` or `had`."""


@dataclass(frozen=True)
class Operand:
    """How one operand is quantized before its GEMM. The default leaves it in high precision.

    Raises ValueError for a combination that means nothing, e.g. a correction of a format other than MXFP4.
    """

    format: str = NONE
    """`none`, or a name of `formats.FORMATS`."""
    rule: Rule = Rule.RCEIL
    """Scale rule of power-of-two scales; other scale types have none."""
    corrections: tuple[Correction, ...] = ()
    """Corrections of MXFP4: at most one of `mbs:B` and `had:N`, then at most one `of:alpha` on top; or `channels:k`."""
    stochastic: bool = False
    """Stochastic rounding: up with the probability that makes it unbiased below saturation."""
    square: bool = False
    """Two-dimensional blocks of B x B elements: the same values whichever GEMM consumes them."""
    as_forward: bool = False
    """Backward roles of X and W only: blocks run along in-features, as in the forward GEMM, not along this GEMM's
    contraction axis. It is what straight-through fake quantization computes (one Q(W), used twice)."""

    def __post_init__(self) -> None:
        if self.format == NONE:
            if self.rule is not Rule.RCEIL or self._modifiers:
                raise ValueError("an operand in high precision takes no rule and no correction")
            return
        if self.format not in FORMATS:
            raise ValueError(f"unknown format {self.format!r}; known: {NONE}, {', '.join(sorted(FORMATS))}")
        if self.corrections and self.format != MXFP4.name:
            raise ValueError(f"corrections are defined for mxfp4, not for {self.format}")
        if (self.stochastic or self.square) and not _has_rule(self.format):
            raise ValueError(f"stochastic rounding and 2-D blocks need power-of-two scales; {self.format} has none")
        if self.corrections and (self.stochastic or self.square):
            raise ValueError("stochastic rounding and 2-D blocks do not combine with mbs, had, of or channels")
        places = [_PLACES.get(correction.kind) for correction in self.corrections]
        if None in places:
            raise ValueError("only mbs:B, had:N, of:ALPHA and channels:K join here; a rule is spelled mxfp4/RULE")
        if places not in ([], [0], [1], [0, 1], [2]):
            raise ValueError("at most one of mbs and had, then at most one of:ALPHA; channels:K stands alone")

    @classmethod
    def parse(cls, text: str) -> Operand:
        """Read any of the three spellings; a correction alone is one of MXFP4 under `rceil`. ValueError says why not.

        In full: `FORMAT[/RULE]` and then, joined by `+`, corrections, `sr`, `2d`, `as_forward`. A rule may also be
        joined by `+`, as inferred recipes have it.
        """
        return _parse(text.strip())

    @classmethod
    def from_correction(cls, correction: Correction | str, rule: Rule = Rule.RCEIL) -> Operand:
        """Return MXFP4 under that rule, with one correction. ValueError where the correction cannot be read."""
        return cls(MXFP4.name, rule).corrected(correction)

    def corrected(self, correction: Correction | str) -> Operand:
        """Return this operand with one correction switched on. ValueError where the two do not combine.

        Rule changes and other formats replace; `mbs`, `had` and `of` join what is there, in place of their like.
        """
        if isinstance(correction, str):
            correction = Correction.parse(correction)
        kind = correction.kind
        if kind is CorrectionKind.KEEP_HIGH_PRECISION:
            return Operand()
        if correction.format is not None:
            rule = self.rule if correction.keeps_format else Rule.RCEIL
            return Operand(correction.format.name, rule, as_forward=self.as_forward)
        plain = self if self.format == MXFP4.name else Operand(MXFP4.name, self.rule, as_forward=self.as_forward)
        if kind is CorrectionKind.RULE:
            return replace(plain, rule=get_rule(str(correction.parameter)))
        if kind is CorrectionKind.STOCHASTIC:
            return replace(plain, stochastic=True)
        kept = [other for other in plain.corrections if _PLACES[other.kind] != _PLACES[kind]]
        return replace(plain, corrections=tuple(sorted([correction, *kept], key=lambda each: _PLACES[each.kind])))

    @property
    def is_high_precision(self) -> bool:
        return self.format == NONE

    @property
    def needs_whole_tensor(self) -> bool:
        """True where a part of the tensor is quantized otherwise than the whole: a scale or a ranking of all of it."""
        ranks = any(correction.kind is CorrectionKind.CHANNEL_RESIDUAL for correction in self.corrections)
        return ranks or (not self.is_high_precision and FORMATS[self.format].tensor_scale)

    @property
    def correction(self) -> Correction | None:
        """The one correction that makes plain MXFP4 this operand; None where no single one does."""
        changes = (Correction(CorrectionKind.RULE, self.rule), *self.corrections, *_WITHOUT_PARAMETER)
        return next((change for change in changes if Operand.from_correction(change) == self), None)

    @property
    def inferred(self) -> str:
        """The spelling of columns `recipe_x` and `recipe_w` of a trace, which say `rceil` of plain MXFP4 only."""
        names_rule = self.rule is not Rule.RCEIL or self == Operand(MXFP4.name)
        return "+".join([self.format, *([self.rule.value] if names_rule else []), *self._modifiers])

    def __str__(self) -> str:
        """Spell the operand in full."""
        head = f"{self.format}/{self.rule}" if _has_rule(self.format) else self.format
        return "+".join([head, *self._modifiers])

    @property
    def _modifiers(self) -> list[str]:
        return [*map(str, self.corrections), *(flag for flag, field in _FLAGS.items() if getattr(self, field))]


_WITHOUT_PARAMETER = tuple(Correction(kind) for kind in CorrectionKind if kind not in _PARAMETRIC)


@cache
def _parse(text: str) -> Operand:
    try:
        return _read(*text.split("+"))
    except ValueError as error:
        raise ValueError(f"cannot read the operand {text!r}: {error}") from None


def _read(head: str, *modifiers: str) -> Operand:
    format, slash, rule = head.partition("/")
    if head == CorrectionKind.KEEP_HIGH_PRECISION.value:
        format = NONE
    elif format not in FORMATS and head.partition(":")[0] in (kind.value for kind in CorrectionKind):
        format, modifiers = MXFP4.name, (head, *modifiers)
    rules = [rule] if slash else []
    flags: dict[str, bool] = {}
    corrections: list[Correction] = []
    for modifier in modifiers:
        if modifier in _FLAGS:
            flags[_FLAGS[modifier]] = True
        elif modifier in _RULES:
            rules.append(_RULES[modifier])
        else:
            corrections.append(Correction.parse(modifier))
    if rules and format in FORMATS and not _has_rule(format):
        raise ValueError(f"{format} has no power-of-two scales, so no scale rule")
    if len(rules) > 1:
        raise ValueError(f"it names {len(rules)} scale rules")
    return Operand(format, get_rule(rules[0]) if rules else Rule.RCEIL, tuple(corrections), **flags)


_RULES = {spelling: rule.value for rule in Rule for spelling in (rule.value, f"{CorrectionKind.RULE}:{rule}")}
"""A rule joined by `+`, alone or as the correction that it is."""


def _has_rule(format: str) -> bool:
    return format in FORMATS and FORMATS[format].scale is ScaleType.E8M0
