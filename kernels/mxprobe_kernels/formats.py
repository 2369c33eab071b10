"""Number formats and scale rules: the one table of each. Corrections of them are in `recipe_grammar`.

Standard library only and Python 3.9 syntax, because the agent ships this file into the attached process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import frexp


class Name(str, Enum):
    """One of a fixed set of names. It prints as it is spelled, as `enum.StrEnum` of Python 3.11 would."""

    def __str__(self) -> str:
        return str(self.value)


class Rule(Name):
    """How the power-of-two (E8M0) scale of a block follows from its amax m. Names are torchao's."""

    RCEIL = "rceil"
    """2^ceil(log2(m/6)): never saturates. TransformerEngine, torchao RCEIL, the paper's "ceiling"."""
    FLOOR = "floor"
    """2^(floor(log2 m) - 2): OCP MX v1.0; 6 < m/s < 8 saturates."""
    EVEN = "even"
    """Round m to the element's mantissa width (ties to even), then as floor. vLLM, Quark."""
    CEIL = "ceil"
    """2^(ceil(log2 m) - 2): torchao CEIL."""
    OAS = "oas"
    """Overflow-aware: as rceil, but a scaled max in (3, 3.5] is doubled into saturation."""
    FLOOR_DIV = "floor_div"
    """2^floor(log2(m/6)): nearly every block clips. Never chosen: the signature of a serving bug."""

    @property
    def covers_amax(self) -> bool:
        """True where s >= s* always holds, so that the deadzone is orthogonal to the other components."""
        return self in (Rule.RCEIL, Rule.CEIL)


class ScaleType(Name):
    E8M0 = "e8m0"
    E4M3 = "e4m3"
    FP32 = "fp32"
    E6M2 = "e6m2"
    """Unsigned, 2^-48 to 1.5 * 2^15; the first of HiF4's three levels."""


@dataclass(frozen=True)
class Format:
    """A block format. Elements are symmetric around zero; `grid` lists the non-negative values in order."""

    name: str
    grid: tuple[float, ...]
    block: int
    """Elements that share a scale, consecutive along the contraction axis."""
    scale: ScaleType
    tensor_scale: bool = False
    """True where a second, fp32 scale for the whole tensor is applied first (NVFP4)."""
    mantissa_bits: int = 1
    """Explicit mantissa bits of an element."""
    min_exponent: int = 0
    """Exponent of the smallest normal element; below it the step stays 2^(min_exponent - mantissa_bits)."""
    four_over_six: bool = False
    """True where each block takes the scale that maps its amax to 6 or the one that maps it to 4, whichever
    leaves less squared error (to 6 where both leave the same)."""
    block_rows: int = 1
    """Neighbouring rows whose blocks share the scale: `block` where blocks are squares. The rows of a tensor are its
    other axes flattened."""

    @property
    def tensor_top(self) -> float:
        """The block scale, in E4M3, of the block that holds the tensor's amax.

        Four-over-Six leaves room: mapped to 4, that block's scale is 1.5 times as large (384).
        """
        return 256.0 if self.four_over_six else 448.0

    @property
    def qmax(self) -> float:
        return self.grid[-1]

    @property
    def max_exponent(self) -> int:
        """floor(log2(qmax)): "emax" of the OCP MX specification."""
        return frexp(self.qmax)[1] - 1

    def amax_bias(self, rule: Rule) -> int:
        """Return what a rule adds to the bits of the fp32 amax before its exponent is read.

        exponent = ((bits(amax) + amax_bias) >> 23) - 127 - max_exponent, clamped to [-127, 127]. A carry out of
        the mantissa field is the rule's "round up"; no logarithm and no division is taken, so no rounding of
        theirs can move a scale.
        """
        qmax_mantissa = int((frexp(self.qmax)[0] * 2 - 1) * 2**23)
        half_step = 1 << (22 - self.mantissa_bits)
        return {
            Rule.RCEIL: 0x7FFFFF - qmax_mantissa,
            Rule.FLOOR: 0,
            Rule.EVEN: half_step,
            Rule.CEIL: 0x7FFFFF,
            Rule.OAS: half_step - 1,
            Rule.FLOOR_DIV: -qmax_mantissa,
        }[rule]


E2M1_GRID: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def minifloat_grid(mantissa_bits: int, min_exponent: int, qmax: float) -> tuple[float, ...]:
    """Return the non-negative values of a mini-float, subnormals included, up to and including qmax."""
    steps = 2**mantissa_bits
    values = [i * 2.0 ** (min_exponent - mantissa_bits) for i in range(steps)]
    exponent = min_exponent
    while values[-1] < qmax:
        values += [(1 + i / steps) * 2.0**exponent for i in range(steps)]
        exponent += 1
    return tuple(v for v in values if v <= qmax)


MXFP4 = Format("mxfp4", E2M1_GRID, block=32, scale=ScaleType.E8M0)
MXFP8 = Format("mxfp8", minifloat_grid(3, -6, 448.0), 32, ScaleType.E8M0, mantissa_bits=3, min_exponent=-6)
NVFP4 = Format("nvfp4", E2M1_GRID, block=16, scale=ScaleType.E4M3, tensor_scale=True)
FP8_BLOCK = Format("fp8_block", MXFP8.grid, 128, ScaleType.FP32, mantissa_bits=3, min_exponent=-6)
"""E4M3 with one fp32 scale for 1 x 128 elements (DeepSeek-style activations)."""
FP8_SQUARE = Format("fp8_square", MXFP8.grid, 128, ScaleType.FP32, mantissa_bits=3, min_exponent=-6, block_rows=128)
"""E4M3 with one fp32 scale for 128 x 128 elements (DeepSeek-style weights)."""
INT4_GROUP = Format("int4_group", tuple(map(float, range(8))), 128, ScaleType.FP32, mantissa_bits=2, min_exponent=2)
"""Symmetric integers -7 to 7 with one fp32 scale for 128 elements. All steps are 1: a binade of one mini-float."""

MXFP6_E3M2 = Format("mxfp6_e3m2", minifloat_grid(2, -2, 28.0), 32, ScaleType.E8M0, mantissa_bits=2, min_exponent=-2)
MXFP6_E2M3 = Format("mxfp6_e2m3", minifloat_grid(3, 0, 7.5), 32, ScaleType.E8M0, mantissa_bits=3)
"""Both MXFP6 element types of OCP MX v1.0; 6.25 bits an element."""
NVFP4_4OVER6 = Format("nvfp4_4over6", E2M1_GRID, 16, ScaleType.E4M3, tensor_scale=True, four_over_six=True)
"""arXiv 2512.02010, by squared error; the tensor scale is amax / (256 * 6)."""
MXFP4_4OVER6 = Format("mxfp4_4over6", E2M1_GRID, 32, ScaleType.E8M0, four_over_six=True)
"""The same choice between powers of two: the rule's scale, or `floor`'s, which maps the power of two in amax to 4 and
saturates. `ceil`'s, which maps all of amax to 4 or less, is no candidate: up to 6, its values are among `rceil`'s."""
HIF4 = Format("hif4", minifloat_grid(2, 0, 7.0), 64, ScaleType.E6M2, mantissa_bits=2)
"""HiFloat4 (arXiv 2602.11287): E6M2 scale of 64, one exponent bit for each 8, another for each 4, elements of
sign and 0 to 1.75 in steps of .25; 4.5 bits an element. `grid` is what an element can be under any exponents."""

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        *(MXFP4, MXFP8, NVFP4, FP8_BLOCK, FP8_SQUARE, INT4_GROUP),
        *(MXFP6_E3M2, MXFP6_E2M3, NVFP4_4OVER6, MXFP4_4OVER6, HIF4),
    )
}


def get_format(format: str | Format) -> Format:
    """Return the format record of that name. ValueError names the known ones."""
    if isinstance(format, Format):
        return format
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[format]


def get_rule(rule: str | Rule) -> Rule:
    """Return the scale rule of that name. ValueError names the known ones."""
    try:
        return Rule(rule)
    except ValueError:
        raise ValueError(f"unknown scale rule {rule!r}; known: {', '.join(r.value for r in Rule)}") from None
