"""Float64 reference of MXFP4 and of the decomposition, in numpy: slow, short, and written another way.

Every decision is a comparison of exactly representable numbers. Powers of two come from frexp, codes from counting
the rounding boundaries below |x|: for Q against z = |x| / 2^e (exact), for Q* by comparing 24 |x| with k amax
(exact in float64 for float32 data). The backends round; this one never does before the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxprobe_kernels.columns import CODE_BINS, COUNTS, DELTA_BINS, ENERGY_SUMS
from mxprobe_kernels.formats import E2M1_GRID, Rule, get_rule

BLOCK = 32
QMAX = 6.0

_GRID = np.array(E2M1_GRID)
# Four times each rounding boundary, and whether the boundary itself still rounds down: a tie goes to the even code.
_BOUNDARIES = ((1, True), (3, False), (5, True), (7, False), (10, True), (14, False), (20, True))

Array = NDArray[Any]


@dataclass(frozen=True)
class Reference:
    """Everything of a `Decomposition`, and element by element what it came from."""

    values: dict[str, Any]
    """Sums and counts by the names of `columns`, with `amax`, `delta_hist` and `code_hist`."""
    exponent: Array
    """int64, one per block along the axis; -127 for zero and excluded blocks."""
    q: Array
    """float64, shaped like x; NaN in excluded blocks."""
    q_star: Array
    """float64, shaped like x; NaN in excluded blocks."""


def exponents(amax: Array, rule: Rule) -> tuple[Array, Array]:
    """Return exponents of scales from finite amax, float64, clamped to [-127, 127] and before clamping; -127 of 0."""
    fraction, power = np.frexp(np.where(amax > 0, amax, 1.0))  # amax = fraction 2^power, fraction in [.5, 1)
    raw = {
        Rule.RCEIL: np.where(fraction <= 0.75, power - 3, power - 2),
        Rule.FLOOR: power - 3,
        Rule.EVEN: np.where(fraction >= 0.875, power - 2, power - 3),
        Rule.CEIL: np.where(fraction == 0.5, power - 3, power - 2),
        Rule.OAS: np.where(fraction <= 0.875, power - 3, power - 2),
        Rule.FLOOR_DIV: np.where(fraction >= 0.75, power - 3, power - 4),
    }[rule].astype(np.int64)
    return np.where(amax > 0, np.clip(raw, -127, 127), -127), np.where(amax > 0, raw, -127)


def round_e2m1(quarters: Array, unit: Array) -> Array:
    """Return codes 0 to 7 of |x| / s, given as `quarters` = 4 |x| and `unit` = s; to nearest, ties to even code."""
    code = np.zeros(quarters.shape, np.int64)
    for boundary, tie_rounds_down in _BOUNDARIES:
        edge = boundary * unit
        code += (quarters > edge) if tie_rounds_down else (quarters >= edge)
    return code


def decompose(x: Array, *, rule: str | Rule = "rceil", axis: int = -1) -> Reference:
    """Decompose x (any float dtype, read as float32) with blocks of 32 along `axis`."""
    chosen = get_rule(rule)
    with np.errstate(over="ignore"):
        moved = np.moveaxis(np.asarray(x).astype(np.float32), axis, -1)
    length = moved.shape[-1]
    n_blocks = -(-length // BLOCK)
    flat = moved.reshape(-1, length)
    padded = np.zeros((flat.shape[0], n_blocks * BLOCK), np.float32)
    padded[:, :length] = flat
    real = np.zeros(padded.shape, bool)
    real[:, :length] = True
    blocks, real = padded.reshape(-1, BLOCK), real.reshape(-1, BLOCK)

    finite = np.isfinite(blocks)
    excluded = ~finite.all(-1, keepdims=True)
    v = np.where(excluded, np.float32(0), blocks).astype(np.float64)
    a = np.abs(v)
    amax = a.max(-1, keepdims=True, initial=0.0)
    exponent, raw = exponents(amax, chosen)
    s = np.ldexp(1.0, exponent)
    code, code_star = round_e2m1(4 * a, s), np.where(a > 0, round_e2m1(24 * a, amax), 0)
    q = np.copysign(_GRID[code] * s, v)
    q_star = np.copysign(_GRID[code_star] * amax / QMAX, v)

    on_d, zeroed, saturated = (code_star == 0) & (a > 0), (code == 0) & (a > 0), a > QMAX * s
    e, e_scale, e_star = q - v, q - q_star, q_star - v
    e_dz, e_grid = np.where(on_d, e_star, 0.0), np.where(on_d, 0.0, e_star)
    included = real & ~excluded
    delta = np.log2(QMAX * s / np.where(amax > 0, amax, 1.0))[amax > 0]
    values: dict[str, Any] = {
        "sum_x2": (v * v).sum(),
        "sum_e2": (e * e).sum(),
        "sum_scale2": (e_scale * e_scale).sum(),
        "sum_dz2": (e_dz * e_dz).sum(),
        "sum_grid2": (e_grid * e_grid).sum(),
        "sum_scale_grid": (e_scale * e_grid).sum(),
        "sum_scale_dz": (e_scale * e_dz).sum(),
        "sum_xq": (v * q).sum(),
        "sum_xqstar": (v * q_star).sum(),
        "sum_e": e.sum(),
        "sum_sat2": (e_scale**2)[saturated].sum(),
        "sum_e2_on_d": (e**2)[on_d].sum(),
        "sum_e2_zeroed": (e**2)[zeroed].sum(),
        "sum_e2_saturated": (e**2)[saturated].sum(),
        "n": int(included.sum()),
        "n_deadzone": int(on_d.sum()),
        "n_zeroed": int(zeroed.sum()),
        "n_zeroed_by_scale": int((zeroed & ~on_d).sum()),
        "n_saturated": int(saturated.sum()),
        "n_clamped": int((raw != exponent).sum()),
        "n_nonfinite": int((~finite).sum()),
        "n_blocks": int(excluded.size),
        "n_blocks_excluded": int(excluded.sum()),
        "amax": float(amax.max(initial=0.0)),
        "delta_hist": np.bincount(
            np.clip(np.floor(delta * DELTA_BINS), 0, DELTA_BINS - 1).astype(np.int64), minlength=DELTA_BINS
        ).tolist(),
        "code_hist": np.bincount((code + 8 * np.signbit(v))[included], minlength=CODE_BINS).tolist(),
    }
    assert set(values) == {*ENERGY_SUMS, *COUNTS, "amax", "delta_hist", "code_hist"}

    def unblocked(per_element: Array) -> Array:
        rows = np.where(excluded, np.nan, per_element).reshape(padded.shape)[:, :length]
        return np.moveaxis(rows.reshape(moved.shape), -1, axis)

    per_block = np.moveaxis(exponent.reshape(*moved.shape[:-1], n_blocks), -1, axis)
    return Reference(values, per_block, unblocked(q), unblocked(q_star))
