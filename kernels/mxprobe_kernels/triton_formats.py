# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Quantizers of every block format as Triton functions, in float64: the arithmetic of `rounding` and `torch_backend`,
operation by operation, so that the bits are theirs. Compile what calls these without fused multiply-adds.

Arguments in capitals are those of `Format` (see `constants`): MANTISSA, LEAST and TOP are an element's mantissa bits,
smallest normal exponent and largest value.
"""

from typing import Any

import triton
import triton.language as tl

from mxprobe_kernels.formats import Format, Rule, ScaleType

E8M0, E4M3, FP32, E6M2 = (tl.constexpr(place) for place in range(len(ScaleType)))
"""Places in `ScaleType`."""


def constants(format: Format, rule: Rule) -> dict[str, Any]:
    """The constexpr arguments that describe a format under a rule."""
    return {
        "SCALE": tuple(ScaleType).index(format.scale),
        "BIAS": format.amax_bias(rule),
        "FLOOR_BIAS": format.amax_bias(Rule.FLOOR),
        "EMAX": format.max_exponent,
        "MANTISSA": format.mantissa_bits,
        "LEAST": format.min_exponent,
        "TOP": format.qmax,
        "TWO": format.four_over_six,
    }


@triton.jit
def _pow2(e):
    return ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _minifloat(z, MANTISSA: tl.constexpr, LEAST: tl.constexpr, TOP: tl.constexpr):
    """z >= 0 to the nearest of a mini-float, ties to even. Adding and taking away 1.5 * 2^52 steps rounds to a step."""
    exponent = tl.maximum((z.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023, LEAST) - MANTISSA
    magic = 1.5 * _pow2(exponent + 52)
    return tl.minimum((z + magic) - magic, TOP)


@triton.jit
def _bf16(z):
    return _minifloat(z, 7, -126, 3.3895313892515355e38)


@triton.jit
def _hif4(z, N: tl.constexpr):
    """As `rounding.round_hif4`: z [N, 64]."""
    groups = tl.reshape(z, [N * 8, 2, 4])
    largest = tl.max(groups, 2, keep_dims=True)
    first = tl.where(tl.max(largest, 1, keep_dims=True) >= 4.0, 2.0, 1.0).to(tl.float64)
    unit = first * tl.where(largest >= 2.0 * first, 2.0, 1.0)
    code = tl.minimum(tl.floor(groups / unit * 4.0 + 0.5) * 0.25, 1.75)
    return tl.reshape(code * unit, [N, 64])


@triton.jit
def rounded(z, N: tl.constexpr, SCALE: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
            TOP: tl.constexpr):  # fmt: skip
    """z = |x| / s [N, B], float64 -> what the format holds of it, in the same units."""
    return _hif4(z, N) if SCALE == E6M2 else _minifloat(z, MANTISSA, LEAST, TOP)


@triton.jit
def scaled(magnitude, scale, SCALE: tl.constexpr):
    """|x| / s as the format's converter computes it; float64 [N, B] and [N, 1]."""
    return magnitude * _bf16(1.0 / scale) if SCALE == E6M2 else magnitude / scale


@triton.jit
def _scale_of(amax, unit, target, SCALE: tl.constexpr, BIAS: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr):
    """amax [N, 1] in float32 -> scale in float64, and 1 where it left the range of its type."""
    bits = amax.to(tl.int32, bitcast=True)
    wide = amax.to(tl.float64)
    if SCALE == E8M0:
        raw = ((bits + BIAS) >> 23) - 127 - EMAX
        exponent = tl.minimum(tl.maximum(raw, -127), 127)
        scale = _pow2(tl.where(bits == 0, -127, exponent))
        out = raw != exponent
    elif SCALE == E6M2:
        ideal = _bf16(wide * 0.142578125)
        held = tl.minimum(tl.maximum(ideal, 3.552713678800501e-15), 49152.0)
        scale = _minifloat(held, 2, -48, 49152.0)
        out = held != ideal
    elif SCALE == FP32:
        ideal = (wide / TOP).to(tl.float32).to(tl.float64)
        scale = tl.where(ideal > 0, ideal, 1.0)
        out = ideal == 0
    else:
        step = _minifloat(wide / target / unit, 3, -6, 448.0)
        scale = tl.maximum(step, 0.001953125) * unit
        out = step == 0
    return scale, (out & (bits != 0)).to(tl.int32)


@triton.jit
def _squared_error(magnitude, scale, N: tl.constexpr, B: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
                   TOP: tl.constexpr):  # fmt: skip
    """[N, B] -> [N, 1], added by halves: every backend finds the same bits."""
    error = _minifloat(magnitude / scale, MANTISSA, LEAST, TOP) * scale - magnitude
    total = tl.sum(tl.reshape(error * error, [N, 2, B // 2]), 1)
    if B == 32:
        total = tl.sum(tl.reshape(total, [N, 2, 8]), 1)
    total = tl.sum(tl.reshape(total, [N, 2, 4]), 1)
    total = tl.sum(tl.reshape(total, [N, 2, 2]), 1)
    return tl.sum(total, 1, keep_dims=True)


@triton.jit
def block_scales(magnitude, amax, unit, N: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
                 FLOOR_BIAS: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
                 TOP: tl.constexpr, TWO: tl.constexpr):  # fmt: skip
    """|x| [N, B] in float64, amax [N, 1] in float32, the tensor's unit -> scale, and 1 where it left its range."""
    scale, out = _scale_of(amax, unit, TOP, SCALE, BIAS, EMAX, TOP)
    if TWO:
        scale = _scale_of(amax, unit, 6.0, SCALE, BIAS, EMAX, TOP)[0]
        to_four, out_four = _scale_of(amax, unit, 4.0, SCALE, FLOOR_BIAS, EMAX, TOP)
        error = _squared_error(magnitude, scale, N, B, MANTISSA, LEAST, TOP)
        better = _squared_error(magnitude, to_four, N, B, MANTISSA, LEAST, TOP) < error
        scale = tl.where(better, to_four, scale)
        out = tl.where(better, out_four, out)
    return scale, out


@triton.jit
def float_bits(raw, BF16: tl.constexpr):
    """Bits of the elements as float32; bf16 comes as int16 bits."""
    return (raw.to(tl.int32) << 16) if BF16 else raw.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def finite_amax(bits):
    """Bits [N, B] -> amax [N, 1] in float32, 0 where the block is excluded; and where it is not."""
    largest = tl.max(bits & 0x7FFFFFFF, 1, keep_dims=True)
    finite = largest < 0x7F800000
    return tl.where(finite, largest, 0).to(tl.float32, bitcast=True), finite
