"""Float64 references of the formats beside MXFP4, in numpy: slow, short, and written another way than the backends.

Elements are found by counting the rounding boundaries below |x| / s, scales by search among all that there are. What
the backends decide on bits is decided here by comparing numbers.

    mxfp6_e3m2, mxfp6_e2m3, mxfp8   OCP MX v1.0, blocks of 32, E8M0 scale by the rule
    nvfp4_4over6, mxfp4_4over6      arXiv 2512.02010: amax to 6 or to 4, by squared error
    hif4                            arXiv 2602.11287: E6M2, eight and sixteen exponent bits, S1P2 elements
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxprobe_kernels.formats import Format, Rule, ScaleType, get_format, get_rule, minifloat_grid

Array = NDArray[Any]

_E4M3 = np.array(minifloat_grid(3, -6, 448.0))
_E6M2 = np.array([(1 + m / 4) * 2.0**e for e in range(-48, 16) for m in range(4)][:-1])  # the last code is NaN


def quantize(x: Array, format: str | Format, *, rule: str | Rule = "rceil", axis: int = -1) -> Array:
    """Q(x), float64, shaped like x (read as float32), blocks along `axis`; NaN in blocks that are not finite.

    ValueError for a format whose scales are real numbers: their definition is the division itself.
    """
    record, chosen = get_format(format), get_rule(rule)
    with np.errstate(over="ignore"):
        moved = np.moveaxis(np.asarray(x).astype(np.float32), axis, -1)
    length, block = moved.shape[-1], record.block
    flat = moved.reshape(-1, length)
    padded = np.zeros((flat.shape[0], -(-length // block) * block), np.float32)
    padded[:, :length] = flat
    blocks = padded.reshape(-1, block).astype(np.float64)
    excluded = ~np.isfinite(blocks).all(-1, keepdims=True)
    magnitude = np.abs(np.where(excluded, 0.0, blocks))
    finite = flat[np.isfinite(flat)]
    tensor_amax = float(np.abs(finite).max(initial=0.0))
    q = np.where(excluded, np.nan, np.copysign(_quantizer(record, chosen, tensor_amax)(magnitude), blocks))
    return np.moveaxis(q.reshape(padded.shape)[:, :length].reshape(moved.shape), -1, axis)


def _quantizer(format: Format, rule: Rule, tensor_amax: float) -> Callable[[Array], Array]:
    """Blocks of magnitudes [N, B] -> the same, quantized."""
    grid = np.array(format.grid)
    if format.scale is ScaleType.E6M2:
        return _hif4
    if format.scale is ScaleType.E8M0:
        if not format.four_over_six:
            return lambda a: _round(a, grid, _power_of_two(a, format, rule))
        return lambda a: _better(
            a, _round(a, grid, _power_of_two(a, format, rule)), _round(a, grid, _power_of_two(a, format, Rule.FLOOR))
        )
    if format.scale is ScaleType.E4M3 and format.four_over_six:
        unit = float(np.float32(tensor_amax) / np.float32(256 * 6)) or 1.0
        return lambda a: _better(a, *(_round(a, grid, _e4m3_scale(a, target, unit)) for target in (6.0, 4.0)))
    raise ValueError(f"{format.name} has no reference here: its scales are not searched for")


def _power_of_two(a: Array, format: Format, rule: Rule) -> Array:
    """The scale of each block among 2^-127 .. 2^127, by the definition of its rule in words."""
    amax = a.max(-1, keepdims=True)
    powers = np.exp2(np.arange(-127.0, 128.0))
    qmax, top = format.qmax, 2.0**format.max_exponent
    last_place = 2.0**-format.mantissa_bits  # of a mantissa in [1, 2)
    least = {
        # The first power of two s for which ... amax holds.
        Rule.RCEIL: powers * qmax,
        Rule.CEIL: powers * top,
        Rule.FLOOR: np.nextafter(powers * 2 * top, 0),
        Rule.EVEN: np.nextafter(powers * 2 * top * (1 - last_place / 4), 0),
        Rule.OAS: powers * 2 * top * (1 - last_place / 4),
        Rule.FLOOR_DIV: np.nextafter(powers * 2 * qmax, 0),
    }[rule]
    index = np.minimum((least < amax).sum(-1, keepdims=True), len(powers) - 1)
    return np.where(amax > 0, powers[index], powers[0])


def _e4m3_scale(a: Array, target: float, unit: float) -> Array:
    step = _round(a.max(-1, keepdims=True) / target / unit, _E4M3, np.ones(1))
    return np.where(step > 0, step, _E4M3[1]) * unit


def _hif4(a: Array) -> Array:
    amax = a.max(-1, keepdims=True)
    # bf16(1/7) is 146/1024; bf16 keeps eight significant bits.
    base = np.clip(_to_bf16(amax * (146 / 1024)), _E6M2[0], _E6M2[-1])
    scale = _round(base, _E6M2, np.ones(1))
    z = (a * _to_bf16(1 / scale)).reshape(-1, 8, 2, 4)
    q = np.zeros_like(z)
    for eight in range(8):
        e8 = z[:, eight].max((1, 2)) >= 4
        for four in range(2):
            part = z[:, eight, four] / (1 + e8)[:, None]
            e4 = part.max(1) >= 2
            part = part / (1 + e4)[:, None]
            # Steps of 1/4 up to 7/4; a tie goes up.
            code = sum((part >= (k + 0.5) / 4).astype(np.float64) for k in range(7))
            q[:, eight, four] = code / 4 * ((1 + e8) * (1 + e4))[:, None]
    return q.reshape(a.shape) * scale


def _round(a: Array, grid: Array, scale: Array) -> Array:
    """a, rounded to the nearest multiple of `scale` by a value of the grid, ties to even codes, saturating."""
    z = a / scale
    middles = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(middles, z, side="left")  # middles < z
    tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == z)
    code = below + (tie & (below % 2 == 1))
    return grid[code] * scale


def _to_bf16(values: Array) -> Array:
    """To nearest of eight significant bits, ties to even; float64 values of float32's normal range."""
    fraction, power = np.frexp(values)
    return np.ldexp(np.rint(fraction * 256), power - 8)


def _better(a: Array, six: Array, four: Array) -> Array:
    return np.where(_squared_error(a, four) < _squared_error(a, six), four, six)


def _squared_error(a: Array, q: Array) -> Array:
    """[N, B] -> [N, 1]: sums of halves, so that no order of addition can decide between two scales."""
    total = (q - a) ** 2
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[:, :half] + total[:, half:]
    return total
