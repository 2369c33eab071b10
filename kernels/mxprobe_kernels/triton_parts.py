# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""What the Triton statistics kernels have in common: rounding, weights, sums over a lane and over the warp.

A tile [RR * RL, CC * V] is seen as [RR, RL, CC, V]: RR rows in a lane's registers, RL and CC its place in the warp,
V elements of one 128-bit load (two for fp32).
"""

import triton
import triton.language as tl
from triton.language.extra.libdevice import fast_dividef

FAR = tl.constexpr(32)
"""Blocks of a program whose scales differ by more than 2^FAR may lose energy of the smaller: e^2 of a block is at least
2^-52 s^2, and 2^-116 is still a normal fp32."""
TINY = tl.constexpr(9.5367431640625e-07)
"""An energy below this, in units of the largest scale^2 that a program has met, may be made of what was lost."""


@triton.jit
def _step(u):
    """The power of two at or below u, at least 1."""
    return (tl.maximum(u, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _rne(u):
    step = _step(u)
    return tl.fma(step, -6291456.0, tl.fma(step, 6291456.0, u))


@triton.jit
def _rne_and_code(u):
    """c, and 4 * code + a multiple of 32: the sum's last bits count half steps, one more per binade is 2 codes."""
    step = _step(u)
    raised = tl.fma(step, 6291457.0, u)
    place = (raised.to(tl.int32, bitcast=True) << 2) + (step.to(tl.int32, bitcast=True) >> 20)
    return tl.fma(step, -6291457.0, raised), place


@triton.jit
def _weight(exponent, top):
    """2^(exponent - top), at least 2^-126."""
    return (tl.maximum(exponent - top + 127, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def six_over(a, LANES: tl.constexpr):
    """6 / a within 2 ulp for a in [1, 12): nobody has to look after the range, which takes six instructions."""
    if LANES == 32:
        ratio = tl.inline_asm_elementwise("div.approx.f32 $0, 0f40C00000, $1;", "=f,f", [a], tl.float32, True, 1)
    elif LANES == 64:
        ratio = fast_dividef(6.0, a)
    else:
        ratio = 6.0 / a
    return ratio


@triton.jit
def _fold(total, value, weight, fade, COLUMNS: tl.constexpr):
    """total * fade + the lane's weighted sum of value, over axes 0 (rows in registers) and 3 (vector)."""
    if COLUMNS:
        part = tl.sum(tl.sum(value, 0, keep_dims=True) * weight, 3, keep_dims=True)
    else:
        part = tl.sum(tl.sum(value, 3, keep_dims=True) * weight, 0, keep_dims=True)
    return total * fade + part


@triton.jit
def _count(total, condition):
    return total + tl.sum(tl.sum(condition.to(tl.int32), 3, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _lowest(low, m):
    """Bits of the smallest amax that is not 0, less 1."""
    below = m.to(tl.uint32, bitcast=True) - 1
    return tl.minimum(low, tl.min(tl.min(below, 3, keep_dims=True), 0, keep_dims=True))


@triton.jit
def _warp_sum(v):
    return tl.sum(tl.sum(tl.sum(tl.sum(v, 3), 2), 1), 0)


@triton.jit
def _warp_max(v):
    return tl.max(tl.max(tl.max(tl.max(v, 3), 2), 1), 0)


@triton.jit
def _warp_min(v):
    return tl.min(tl.min(tl.min(tl.min(v, 3), 2), 1), 0)


@triton.jit
def _far_apart(low, exponent_top, BIAS: tl.constexpr):
    """Whether the warp's blocks, zero ones aside, have scales that differ by more than 2^FAR."""
    smallest = _warp_min(low)
    bits = tl.where(smallest == 0xFFFFFFFF, 0x7F000000, smallest.to(tl.int32, bitcast=True))
    return exponent_top - tl.maximum(((bits + BIAS) >> 23) - 2, 0) > FAR


@triton.jit
def _power_of_two(biased_exponent):
    """2^(e - 127), float64."""
    return ((biased_exponent.to(tl.int64) + 896) << 52).to(tl.float64, bitcast=True)
