# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false
"""MXFP4 statistics in one pass over a matrix, for NVIDIA and AMD.

With s the block's power-of-two scale and m its amax, everything is computed in units of s, so that no value of x
can overflow or vanish:

    u  = |x| / s            exact            a  = m / s                    exact
    c  = rne(u), at most 6  Q = s c          c* = rne(6 u / a)             Q* = s c* a / 6
    e  = c - u              exact            r  = c* a - 6 u   (Q* - x)    b  = 6 c - c* a   (Q - Q*), in sixths

and summed per lane in fp32 beside a running exponent E (the largest scale a lane has met): sums of the lane are
multiples of 2^E or 4^E. One program is one warp: a block lies within neighbouring lanes, so that no shared memory
is touched, and a lane loads 128 bits at a time.

b loses nothing when the two quantizers nearly agree, nor r when x lies on the ideal grid: products are exact, but for
fp32's c* a. There r = (c* - t) a - (6 u - t a), of the snapped ratio t below, and b is rounded once.

rne(u) adds and subtracts 1.5 * 2^22 units of the last place of u's binade (at least 1): the sum rounds to nearest,
ties to even. 6 u / a is u * (6 / a), off by some ulp; snapping it to multiples of 2^-17 makes exact ties exact. For
bf16 and fp16 no other ratio is that close to a tie (their significands are 11 bits at most: 2^-17.6); for fp32 the
sign of 6 u - t a, exact by two fused multiply-adds, tells on which side of t the ratio lies.

Two things are not worth an instruction an element, because hardly any tensor has them: NaN and infinity, and sums that
may have lost what lies 2^32 below a program's largest scale (its own energy is zero, or nearly, while others' is not).
A program that meets either raises a flag, and `triton_exact` does the whole tensor again in float64.

With offsets, program (p, g) takes rows offsets[g] to offsets[g + 1] alone: one launch for all experts.
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
    _rne_and_code,
    _warp_max,
    _warp_sum,
    _weight,
    six_over,
)

FLOAT_SUMS = (
    "x2",  # sum u^2
    "xe",  # sum u e
    "xr",  # sum u r
    "e2",
    "b2",
    "g2",  # r^2 off D
    "d2",  # r^2 on D
    "bg",  # sum b r off D
    "z2",  # u^2 where c = 0
    "e",  # signed
    "bd",  # sum b r on D; from here on only where s < s* can happen
    "b2_saturated",
    "e2_on_d",
    "e2_saturated",
)
INT_SUMS = ("on_d", "zero", "saturated", "by_scale")
"""Elements with c* = 0, x = 0 (and of excluded blocks, and past the edge), u > 6, c = 0 but not c*."""
CODE_SLOT = len(FLOAT_SUMS) + len(INT_SUMS)
N_SLOTS = CODE_SLOT + 16
MAX_TILES_PER_PROGRAM = 64
"""Bounds the fp32 rounding of a lane (about 1e-7 of a sum) and the 16-bit counters of the code histogram."""


@triton.jit
def _ideal_ratio(u, a, ratio):
    """6 u / a such that rounding it gives c* of the exact quotient, for bf16 and fp16."""
    return (u * ratio + 96.0) - 96.0


@triton.jit
def _exact_components(u, a, ratio, c):
    """c*, r and b of fp32: of t, the snapped ratio, and 6 u - t a, which two roundings leave exact."""
    t = (u * ratio + 96.0) - 96.0
    product = t * a
    residual = tl.fma(u, 6.0, -product) - tl.fma(t, a, -product)
    c_star = _rne(t + tl.minimum(tl.maximum(residual * 1.0e30, -3.814697265625e-06), 3.814697265625e-06))
    r = tl.fma(c_star - t, a, -residual)
    return c_star, r, tl.fma(-c_star, a, c * 6.0)


@triton.jit
def _narrow(bits, BF16: tl.constexpr, EXACT: tl.constexpr):
    """Bits of an fp32 that came from the input's dtype -> bits of that dtype."""
    if BF16:
        own = (bits >> 16).to(tl.int16)
    elif EXACT:
        own = bits
    else:
        own = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
    return own


@triton.jit
def full_statistics(
    x_ptr,
    amax_ptr,
    part_ptr,
    flag_ptr,
    enabled_ptr,
    offsets_ptr,
    n_rows,
    n_columns,
    stride_row,
    blocks_per_row,
    tiles_across,
    BIAS: tl.constexpr,
    COVERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    BF16: tl.constexpr,
    EXACT: tl.constexpr,
    LANES_OF_WARP: tl.constexpr,
    RR: tl.constexpr,
    RL: tl.constexpr,
    CC: tl.constexpr,
    V: tl.constexpr,
    N_SLOTS: tl.constexpr,
):
    """x [n_rows, n_columns] -> bits of amax in x's dtype, one per block, and part float64 [groups, programs, N_SLOTS].

    bf16 comes as int16 bits (BF16): a register move widens it, and subnormals survive. `enabled_ptr`: int32, or None;
    where it holds 0 nothing is read and part is 0. Column blocks of group g start at amax row offsets[g] // 32 + g.
    """
    program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    group = tl.program_id(1)
    ROWS: tl.constexpr = RR * RL
    COLS: tl.constexpr = CC * V
    LANES: tl.constexpr = 32 // V  # neighbouring lanes that hold one row block
    HALVES: tl.constexpr = EXACT and not COLUMNS and V == 8
    first = 0
    end = n_rows
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + group).to(tl.int32)
        end = tl.load(offsets_ptr + group + 1).to(tl.int32)
    n_tiles = tl.cdiv(end - first, ROWS) * tiles_across
    if enabled_ptr is not None:
        n_tiles *= tl.load(enabled_ptr)
    zero = tl.zeros([1, RL, CC, 1], tl.float32)
    none = tl.zeros([1, RL, CC, 1], tl.int32)
    E = none
    low = none.to(tl.uint32, bitcast=True) + 0xFFFFFFFF
    peak = none
    x2 = zero
    xe = zero
    xr = zero
    e2 = zero
    b2 = zero
    g2 = zero
    d2 = zero
    bg = zero
    z2 = zero
    e1 = zero
    bd = zero
    b2_sat = zero
    e2_d = zero
    e2_sat = zero
    n_on_d = none
    n_null = none
    n_sat = none
    n_by_scale = none
    # two codes a word, 16 bits each: plus and minus, codes (0, 4), (1, 5), (2, 6), (3, 7)
    p0 = none
    p1 = none
    p2 = none
    p3 = none
    m0 = none
    m1 = none
    m2 = none
    m3 = none
    in_row = tl.arange(0, ROWS)
    in_col = tl.arange(0, COLS)
    for tile in range(program, n_tiles, n_programs):
        top = first + (tile // tiles_across) * ROWS
        left = (tile % tiles_across) * COLS
        rows = top + in_row
        cols = left + in_col
        if HALVES:
            # a lane's eight elements of a block are two loads of four, sixteen elements apart
            part = tl.arange(0, 2 * RR)[:, None, None]
            at_row = top + part // 2 * RL + tl.arange(0, RL)[None, :, None]
            at_col = left + part % 2 * 16 + tl.arange(0, 16)[None, None, :]
            pointers = x_ptr + at_row.to(tl.int64) * stride_row + at_col
            inside = (at_row < end) & (at_col < n_columns)
        else:
            pointers = x_ptr + rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
            inside = (rows[:, None] < end) & (cols[None, :] < n_columns)
        raw = tl.load(pointers, mask=inside, other=0) if MASK else tl.load(pointers)
        bits = (raw.to(tl.int32) << 16) if BF16 else raw.to(tl.float32).to(tl.int32, bitcast=True)
        if HALVES:
            bits = tl.permute(tl.reshape(bits, [RR, 2, RL, CC, 4]), [0, 2, 3, 1, 4])
        bits = tl.reshape(bits, [RR, RL, CC, V])
        magnitude = bits & 0x7FFFFFFF
        if COLUMNS:
            am = tl.max(tl.max(magnitude, axis=0, keep_dims=True), axis=1, keep_dims=True)
            # stored through the pointers' layout of the load, so that no lane hands a value to another
            block = tile // tiles_across
            if offsets_ptr is not None:
                block += first // 32 + group
            slots = block.to(tl.int64) * n_columns + cols[None, :] + rows[:, None] * 0
            wanted = (in_row == 0)[:, None] & (cols < n_columns)[None, :]
            spread = tl.reshape(tl.broadcast_to(am, [RR, RL, CC, V]), [ROWS, COLS])
            tl.store(amax_ptr + slots, _narrow(spread, BF16, EXACT), mask=wanted)
        else:
            am = tl.max(magnitude, axis=3)
            am = tl.max(tl.reshape(am, [RR, RL, CC // LANES, LANES]), axis=3, keep_dims=True)
            am = tl.reshape(tl.broadcast_to(am, [RR, RL, CC // LANES, LANES]), [RR, RL, CC, 1])
            lane = tl.arange(0, CC)
            block = left // 32 + lane // LANES
            slots = rows.to(tl.int64)[:, None] * blocks_per_row + block[None, :]
            wanted = (rows[:, None] < end) & (block < blocks_per_row)[None, :] & (lane % LANES == 0)[None, :]
            tl.store(
                amax_ptr + tl.reshape(slots, [RR, RL, CC, 1]),
                _narrow(am, BF16, EXACT),
                mask=tl.reshape(wanted, [RR, RL, CC, 1]),
            )
        peak = tl.maximum(peak, tl.max(tl.max(am, axis=3, keep_dims=True), axis=0, keep_dims=True))
        finite = am < 0x7F800000
        m = tl.where(finite, am, 0)
        keep = tl.where(finite, 0x7FFFFFFF, 0)
        exponent = tl.maximum(((m + BIAS) >> 23) - 2, 0)  # at most 253, from the largest fp32
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        a = m.to(tl.float32, bitcast=True) * inverse
        divisor = tl.where(m > 0, a, 1.0)  # below 12: no range has to be looked after
        ratio = six_over(divisor, LANES_OF_WARP)
        x = bits & keep
        u = x.to(tl.float32, bitcast=True) * inverse

        c, place = _rne_and_code(u if COVERS else tl.minimum(u, 6.0))
        if EXACT:
            c_star, r, b = _exact_components(u, a, ratio, c)
        else:
            c_star = _rne(_ideal_ratio(u, a, ratio))
            ideal = c_star * a
            r = tl.fma(u, -6.0, ideal)
            b = tl.fma(c, 6.0, -ideal)
        e = c - u
        on_d = c_star == 0.0
        d = tl.where(on_d, r, 0.0)
        g = tl.where(on_d, 0.0, r)
        z = tl.where(c == 0.0, u, 0.0)
        signed = (e.to(tl.int32, bitcast=True) ^ (bits & -2147483648)).to(tl.float32, bitcast=True)

        low = _lowest(low, m)
        if COLUMNS:
            E_new = tl.maximum(E, tl.max(exponent, axis=3, keep_dims=True))
        else:
            E_new = tl.maximum(E, tl.max(exponent, axis=0, keep_dims=True))
        w1 = _weight(exponent, E_new)
        f1 = _weight(E, E_new)
        w2 = w1 * w1
        f2 = f1 * f1
        E = E_new
        x2 = _fold(x2, u * u, w2, f2, COLUMNS)
        xe = _fold(xe, u * e, w2, f2, COLUMNS)
        xr = _fold(xr, u * r, w2, f2, COLUMNS)
        e2 = _fold(e2, e * e, w2, f2, COLUMNS)
        b2 = _fold(b2, b * b, w2, f2, COLUMNS)
        g2 = _fold(g2, g * g, w2, f2, COLUMNS)
        d2 = _fold(d2, d * d, w2, f2, COLUMNS)
        bg = _fold(bg, b * g, w2, f2, COLUMNS)
        z2 = _fold(z2, z * z, w2, f2, COLUMNS)
        e1 = _fold(e1, signed, w1, f1, COLUMNS)
        n_on_d = _count(n_on_d, on_d)
        n_null = _count(n_null, x == 0)
        if not COVERS:
            sat = u > 6.0
            bd = _fold(bd, b * d, w2, f2, COLUMNS)
            b2_sat = _fold(b2_sat, tl.where(sat, b * b, 0.0), w2, f2, COLUMNS)
            e2_d = _fold(e2_d, tl.where(on_d, e * e, 0.0), w2, f2, COLUMNS)
            e2_sat = _fold(e2_sat, tl.where(sat, e * e, 0.0), w2, f2, COLUMNS)
            n_sat = _count(n_sat, sat)
            n_by_scale = _count(n_by_scale, (c == 0.0) & (c_star != 0.0))
        one = 1 << (place & 31)
        every = tl.sum(one, 3, keep_dims=True)  # V <= 8 codes in eight 4-bit counters
        minus = tl.sum(one & (bits >> 31) & keep, 3, keep_dims=True)
        plus = every - minus
        p0 += tl.sum(plus & 0x000F000F, 0, keep_dims=True)
        p1 += tl.sum((plus >> 4) & 0x000F000F, 0, keep_dims=True)
        p2 += tl.sum((plus >> 8) & 0x000F000F, 0, keep_dims=True)
        p3 += tl.sum((plus >> 12) & 0x000F000F, 0, keep_dims=True)
        m0 += tl.sum(minus & 0x000F000F, 0, keep_dims=True)
        m1 += tl.sum((minus >> 4) & 0x000F000F, 0, keep_dims=True)
        m2 += tl.sum((minus >> 8) & 0x000F000F, 0, keep_dims=True)
        m3 += tl.sum((minus >> 12) & 0x000F000F, 0, keep_dims=True)

    E_top = _warp_max(E)
    w1 = _weight(E, E_top)
    w2 = w1 * w1
    F1 = _power_of_two(E_top)
    F2 = F1 * F1
    out = part_ptr + (group * n_programs + program) * N_SLOTS
    s_e2 = _warp_sum(e2 * w2)
    s_b2 = _warp_sum(b2 * w2)
    s_g2 = _warp_sum(g2 * w2)
    s_d2 = _warp_sum(d2 * w2)
    s_z2 = _warp_sum(z2 * w2)
    nulls = _warp_sum(n_null)
    on_ds = _warp_sum(n_on_d) - nulls
    c0 = _warp_sum(p0 & 0xFFFF)
    c8 = _warp_sum(m0 & 0xFFFF)
    lost = _far_apart(low, E_top, BIAS) & (tl.minimum(tl.minimum(s_e2, s_b2), s_g2) < TINY)
    lost |= (c0 + c8 > nulls) & (s_z2 < TINY)
    lost |= (on_ds > 0) & (s_d2 < TINY)
    tl.store(out + 0, _warp_sum(x2 * w2).to(tl.float64) * F2)
    tl.store(out + 1, _warp_sum(xe * w2).to(tl.float64) * F2)
    tl.store(out + 2, _warp_sum(xr * w2).to(tl.float64) * F2)
    tl.store(out + 3, s_e2.to(tl.float64) * F2)
    tl.store(out + 4, s_b2.to(tl.float64) * F2)
    tl.store(out + 5, s_g2.to(tl.float64) * F2)
    tl.store(out + 6, s_d2.to(tl.float64) * F2)
    tl.store(out + 7, _warp_sum(bg * w2).to(tl.float64) * F2)
    tl.store(out + 8, s_z2.to(tl.float64) * F2)
    tl.store(out + 9, _warp_sum(e1 * w1).to(tl.float64) * F1)
    if not COVERS:
        s_sat = _warp_sum(e2_sat * w2)
        s_bsat = _warp_sum(b2_sat * w2)
        s_e2_d = _warp_sum(e2_d * w2)
        sats = _warp_sum(n_sat)
        lost |= (sats > 0) & (tl.minimum(s_sat, s_bsat) < TINY) & _far_apart(low, E_top, BIAS)
        lost |= (on_ds > 0) & (s_e2_d < TINY)
        tl.store(out + 10, _warp_sum(bd * w2).to(tl.float64) * F2)
        tl.store(out + 11, s_bsat.to(tl.float64) * F2)
        tl.store(out + 12, s_e2_d.to(tl.float64) * F2)
        tl.store(out + 13, s_sat.to(tl.float64) * F2)
        tl.store(out + 16, sats.to(tl.float64))
        tl.store(out + 17, _warp_sum(n_by_scale).to(tl.float64))
    tl.store(out + 14, on_ds.to(tl.float64))
    tl.store(out + 15, nulls.to(tl.float64))
    tl.store(out + 18, c0.to(tl.float64))
    tl.store(out + 26, c8.to(tl.float64))
    tl.store(out + 19, _warp_sum(p1 & 0xFFFF).to(tl.float64))
    tl.store(out + 20, _warp_sum(p2 & 0xFFFF).to(tl.float64))
    tl.store(out + 21, _warp_sum(p3 & 0xFFFF).to(tl.float64))
    tl.store(out + 22, _warp_sum(p0 >> 16).to(tl.float64))
    tl.store(out + 23, _warp_sum(p1 >> 16).to(tl.float64))
    tl.store(out + 24, _warp_sum(p2 >> 16).to(tl.float64))
    tl.store(out + 25, _warp_sum(p3 >> 16).to(tl.float64))
    tl.store(out + 27, _warp_sum(m1 & 0xFFFF).to(tl.float64))
    tl.store(out + 28, _warp_sum(m2 & 0xFFFF).to(tl.float64))
    tl.store(out + 29, _warp_sum(m3 & 0xFFFF).to(tl.float64))
    tl.store(out + 30, _warp_sum(m0 >> 16).to(tl.float64))
    tl.store(out + 31, _warp_sum(m1 >> 16).to(tl.float64))
    tl.store(out + 32, _warp_sum(m2 >> 16).to(tl.float64))
    tl.store(out + 33, _warp_sum(m3 >> 16).to(tl.float64))
    tl.atomic_max(flag_ptr, 1, mask=lost | (_warp_max(peak) >= 0x7F800000))
