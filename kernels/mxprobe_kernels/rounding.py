"""Scales from the bits of amax, and rounding to an element grid. Shipped.

    s      = 2^e,  e = ((bits(amax) + bias(rule)) >> 23) - 127 - emax      clamped to E8M0's [-127, 127]
    c      = step(z) * round_half_even(z / step(z)),  saturating at qmax    z = |x| / s

Ties go to the even code, because c / step is the integer of the code's last place. HiF4 has rules of its own:
`hif4_scale` and `round_hif4`.
"""

from __future__ import annotations

import torch

from mxprobe_kernels.formats import Format, Rule

E8M0_BIAS = 127
FP32_INF_BITS = 0x7F800000


def amax_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of max|x| of blocks, float32 [..., B], int32 [..., 1], and which are excluded, bool [..., 1].

    The bits are 0 where excluded. All is decided on integers: the bits of |x| order as |x| does, and a NaN or infinity
    is the largest of all.
    """
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    bits = magnitude.amax(-1, keepdim=True)
    excluded = bits >= FP32_INF_BITS
    return bits.masked_fill(excluded, 0), excluded


def scale_exponent(bits: torch.Tensor, format: Format, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exponent (int32) of the power-of-two scale from bits of amax (int32), and whether E8M0 clamped it.

    A zero block has exponent -127 and counts as not clamped.
    """
    raw = ((bits + format.amax_bias(rule)) >> 23) - E8M0_BIAS - format.max_exponent
    exponent = raw.clamp(-E8M0_BIAS, E8M0_BIAS)
    return exponent.masked_fill(bits == 0, -E8M0_BIAS), (raw != exponent) & (bits != 0)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^e exactly, float64, for integer e in [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_to_grid(z: torch.Tensor, format: Format) -> torch.Tensor:
    """Round non-negative float64 z to the nearest element value, ties to even code, saturating at qmax."""
    return round_minifloat(z, format.mantissa_bits, format.min_exponent, format.qmax)


def round_minifloat(z: torch.Tensor, mantissa_bits: int, min_exponent: int, qmax: float) -> torch.Tensor:
    """Round z (float64, non-negative, finite) to the nearest value of a saturating mini-float, ties to even."""
    exponent = ((z.view(torch.int64) >> 52) - 1023).clamp_(min=min_exponent).sub_(mantissa_bits)
    step = exponent.add_(1023).bitwise_left_shift_(52).view(torch.float64)
    return (z / step).round_().mul_(step).clamp_(max=qmax)


def tensor_unit(tensor_amax: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the scale of a tensor from its max|x|, rounded once to float32 and held in float64 []; 1 for zeros."""
    unit = (tensor_amax.float() / (format.tensor_top * format.qmax)).double()
    return torch.where(unit > 0, unit, 1.0)


_BF16 = (7, -126, 3.3895313892515355e38)  # explicit mantissa bits, smallest normal exponent, largest value
_HIF4_SEVENTH = 146 / 1024  # bf16(1 / 7)
HIF4_SCALE_MIN, HIF4_SCALE_MAX = 2.0**-48, 1.5 * 2.0**15


def hif4_scale(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E6M2(bf16(amax * bf16(1/7))), float64, of amax in float64, and whether it left E6M2's range (bool).

    Both roundings to nearest even. Every product is exact in float64.
    """
    ideal = round_minifloat(amax * _HIF4_SEVENTH, *_BF16)
    held = ideal.clamp(HIF4_SCALE_MIN, HIF4_SCALE_MAX)
    return round_minifloat(held, 2, -48, HIF4_SCALE_MAX), (held != ideal) & (amax > 0)


def hif4_reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return bf16(1 / s) as float64: the converter multiplies by this and does not divide."""
    return round_minifloat(torch.reciprocal(scale), *_BF16)


def round_hif4(z: torch.Tensor) -> torch.Tensor:
    """Return what HiF4 holds of z [..., 64], float64, non-negative, relative to the first-level scale; same units.

    e8 = [max of 8 >= 4],  e4 = [max of 4 / 2^e8 >= 2],  c = floor(4 z / 2^(e8 + e4) + 1/2) / 4, at most 1.75
    """
    groups = z.unflatten(-1, (8, 2, 4))
    largest = groups.amax(-1, keepdim=True)
    e8 = (largest.amax(-2, keepdim=True) >= 4.0).double()
    unit = (1.0 + e8) * (1.0 + (largest >= 2.0 * (1.0 + e8)).double())
    return (groups / unit).mul_(4.0).add_(0.5).floor_().div_(4.0).clamp_(max=1.75).mul_(unit).reshape(z.shape)


def e2m1_code(magnitude: torch.Tensor) -> torch.Tensor:
    """Return codes 0 to 7 of the E2M1 values 0, .5, 1, 1.5, 2, 3, 4, 6, in the dtype of the input.

    min(2c, c + 2, c / 2 + 4): the three binades are the three pieces of a concave function.
    """
    return torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
