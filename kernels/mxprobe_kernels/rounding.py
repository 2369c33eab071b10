"""Scales from the bits of amax, and rounding to an element grid. Shipped.

    s      = 2^e,  e = ((bits(amax) + bias(rule)) >> 23) - 127 - emax      clamped to E8M0's [-127, 127]
    c      = step(z) * round_half_even(z / step(z)),  saturating at qmax    z = |x| / s

Ties go to the even code, because c / step is the integer of the code's last place.
"""

from __future__ import annotations

import torch

from mxprobe_kernels.formats import Format, Rule

E8M0_BIAS = 127
FP32_INF_BITS = 0x7F800000


def amax_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., B] -> bits of max|x| (int32 [..., 1], 0 where excluded), and excluded (bool [..., 1]).

    Decided on integers: the bits of |x| order as |x| does, and a NaN or infinity is the largest of all.
    """
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    bits = magnitude.amax(-1, keepdim=True)
    excluded = bits >= FP32_INF_BITS
    return bits.masked_fill(excluded, 0), excluded


def scale_exponent(bits: torch.Tensor, format: Format, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of amax (int32) -> exponent of the power-of-two scale (int32), and whether E8M0 clamped it (bool).

    A zero block has exponent -127 and counts as not clamped.
    """
    raw = ((bits + format.amax_bias(rule)) >> 23) - E8M0_BIAS - format.max_exponent
    exponent = raw.clamp(-E8M0_BIAS, E8M0_BIAS)
    return exponent.masked_fill(bits == 0, -E8M0_BIAS), (raw != exponent) & (bits != 0)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^e exactly, float64, for integer e in [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_to_grid(z: torch.Tensor, format: Format) -> torch.Tensor:
    """Non-negative float64 z -> nearest element value, ties to even code, saturating at qmax."""
    return round_minifloat(z, format.mantissa_bits, format.min_exponent, format.qmax)


def round_minifloat(z: torch.Tensor, mantissa_bits: int, min_exponent: int, qmax: float) -> torch.Tensor:
    """Round-to-nearest-even onto a saturating mini-float; z float64, non-negative and finite."""
    exponent = ((z.view(torch.int64) >> 52) - 1023).clamp_(min=min_exponent).sub_(mantissa_bits)
    step = exponent.add_(1023).bitwise_left_shift_(52).view(torch.float64)
    return (z / step).round_().mul_(step).clamp_(max=qmax)


def e2m1_code(magnitude: torch.Tensor) -> torch.Tensor:
    """E2M1 values 0, .5, 1, 1.5, 2, 3, 4, 6 -> codes 0 to 7 (same dtype as the input).

    min(2c, c + 2, c / 2 + 4): the three binades are the three pieces of a concave function.
    """
    return torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
