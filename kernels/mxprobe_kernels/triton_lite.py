# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The always-on statistics: sum x^2, sum e^2, zeroed and saturated elements, amax. As `triton_kernels`, and less.

No ideal quantizer, no histogram, no signed sum. A program that meets NaN or infinity, or may have lost energy, raises
the flag on which `triton_exact` does the whole tensor again.
"""

import triton
import triton.language as tl

from mxprobe_kernels.triton_parts import (
    TINY,
    _count,
    _far_apart,
    _fold,
    _lowest,
    _power_of_two,
    _rne,
    _warp_max,
    _warp_sum,
    _weight,
)

LITE_SLOTS = 4
"""sum u^2, sum e^2, zeroed, saturated."""


@triton.jit
def lite_statistics(
    x_ptr,
    amax_ptr,
    part_ptr,
    flag_ptr,
    enabled_ptr,
    n_rows,
    n_columns,
    stride_row,
    n_tiles,
    tiles_across,
    BIAS: tl.constexpr,
    COVERS: tl.constexpr,
    MASK: tl.constexpr,
    BF16: tl.constexpr,
    RR: tl.constexpr,
    RL: tl.constexpr,
    CC: tl.constexpr,
    V: tl.constexpr,
    N_SLOTS: tl.constexpr,
):
    """Row blocks of x [n_rows, n_columns] -> amax bits int32 [programs] and part float64 [programs, N_SLOTS].

    amax is that of the finite blocks. `enabled_ptr` as in `full_statistics`.
    """
    program = tl.program_id(0)
    if enabled_ptr is not None:
        n_tiles *= tl.load(enabled_ptr)
    LANES: tl.constexpr = 32 // V
    zero = tl.zeros([1, RL, CC, 1], tl.float32)
    none = tl.zeros([1, RL, CC, 1], tl.int32)
    E = none
    low = none.to(tl.uint32, bitcast=True) + 0xFFFFFFFF
    x2 = zero
    e2 = zero
    n_zero = none
    n_sat = none
    peak = none
    worst = none
    in_row = tl.arange(0, RR * RL)
    in_col = tl.arange(0, CC * V)
    for tile in range(program, n_tiles, tl.num_programs(0)):
        rows = (tile // tiles_across) * (RR * RL) + in_row
        cols = (tile % tiles_across) * (CC * V) + in_col
        pointers = x_ptr + rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
        if MASK:
            raw = tl.load(pointers, mask=(rows[:, None] < n_rows) & (cols[None, :] < n_columns), other=0)
        else:
            raw = tl.load(pointers)
        bits = (raw.to(tl.int32) << 16) if BF16 else raw.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = tl.reshape(bits, [RR, RL, CC, V]) & 0x7FFFFFFF
        am = tl.max(magnitude, axis=3)
        am = tl.max(tl.reshape(am, [RR, RL, CC // LANES, LANES]), axis=3, keep_dims=True)
        am = tl.reshape(tl.broadcast_to(am, [RR, RL, CC // LANES, LANES]), [RR, RL, CC, 1])
        finite = am < 0x7F800000
        m = tl.where(finite, am, 0)
        worst = tl.maximum(worst, tl.max(am, axis=0, keep_dims=True))
        peak = tl.maximum(peak, tl.max(m, axis=0, keep_dims=True))
        low = _lowest(low, m)
        exponent = tl.maximum(((m + BIAS) >> 23) - 2, 0)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        x = magnitude & tl.where(finite, -1, 0)
        u = x.to(tl.float32, bitcast=True) * inverse
        c = _rne(u if COVERS else tl.minimum(u, 6.0))
        e = c - u
        E_new = tl.maximum(E, tl.max(exponent, axis=0, keep_dims=True))
        w = _weight(exponent, E_new)
        fade = _weight(E, E_new)
        E = E_new
        x2 = _fold(x2, u * u, w * w, fade * fade, False)
        e2 = _fold(e2, e * e, w * w, fade * fade, False)
        n_zero = _count(n_zero, (c == 0.0) & (x != 0))
        if not COVERS:
            n_sat = _count(n_sat, u > 6.0)
    E_top = _warp_max(E)
    w = _weight(E, E_top)
    factor = _power_of_two(E_top)
    factor *= factor
    s_e2 = _warp_sum(e2 * w * w)
    zeroed = _warp_sum(n_zero)
    out = part_ptr + program * N_SLOTS
    tl.store(out + 0, _warp_sum(x2 * w * w).to(tl.float64) * factor)
    tl.store(out + 1, s_e2.to(tl.float64) * factor)
    tl.store(out + 2, zeroed.to(tl.float64))
    tl.store(out + 3, _warp_sum(n_sat).to(tl.float64))
    tl.store(amax_ptr + program, _warp_max(peak))
    lost = (s_e2 < TINY) & ((zeroed > 0) | _far_apart(low, E_top, BIAS))
    tl.atomic_max(flag_ptr, 1, mask=lost | (_warp_max(worst) >= 0x7F800000))
