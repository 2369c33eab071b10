# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""MXFP4 statistics in one pass over a matrix, for NVIDIA and AMD.

With s the block's power-of-two scale and m its amax, everything is computed in units of s, so that no value of x
can overflow or vanish:

    u  = |x| / s            exact            a  = m / s                    exact
    c  = rne(u), at most 6  Q = s c          c* = rne(6 u / a)             Q* = s c* a / 6
    e  = c - u              exact            r  = c* a - 6 u   (Q* - x)    b  = 6 c - c* a   (Q - Q*), in sixths

and summed per lane in fp32 beside a running exponent E (the largest scale a lane has met): sums of the lane are
multiples of 2^E or 4^E. One program is one warp: a block lies within neighbouring lanes, so that no shared memory
is touched, and a lane loads 128 bits at a time.

b loses nothing when the two quantizers nearly agree, nor r when x lies on the ideal grid: products are exact (fp32
carries the rest of c* a along).

rne(u) adds and subtracts 1.5 * 2^22 units of the last place of u's binade (at least 1): the sum rounds to nearest,
ties to even. 6 u / a is u * (6 / a), off by some ulp; snapping it to multiples of 2^-17 makes exact ties exact. For
bf16 and fp16 no other ratio is that close to a tie (their significands are 11 bits at most: 2^-17.6); for fp32 the
sign of 6 u - t a, exact by two fused multiply-adds, tells on which side of t the ratio lies.

Legend: RR rows per lane in registers, RL lanes along rows, CC lanes along columns, V elements of a lane's load;
RL * CC = lanes of a warp; a tile is [RR * RL, CC * V], seen as [RR, RL, CC, V].
"""

import triton
import triton.language as tl

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
INT_SUMS = ("deadzone", "zeroed", "saturated", "zeroed_by_scale", "nonfinite")
CODE_SLOT = len(FLOAT_SUMS) + len(INT_SUMS)
N_SLOTS = CODE_SLOT + 16
MAX_TILES_PER_PROGRAM = 64
"""Bounds the fp32 rounding of a lane (about 1e-7 of a sum) and the 16-bit counters of the code histogram."""


@triton.jit
def _rne(u):
    step = (tl.maximum(u, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(step, -6291456.0, tl.fma(step, 6291456.0, u))


@triton.jit
def _pow2(e):
    return (tl.maximum(e + 127, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _ideal_ratio(u, a, ratio, EXACT: tl.constexpr):
    """6 u / a such that rounding it gives c* of the exact quotient."""
    t = (u * ratio + 96.0) - 96.0
    if EXACT:
        product = t * a
        residual = tl.fma(u, 6.0, -product) - tl.fma(t, a, -product)
        t += tl.minimum(tl.maximum(residual * 1.0e30, -3.814697265625e-06), 3.814697265625e-06)
    return t


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
def _count_nonfinite(total, magnitude):
    """One more than the exponent of infinities reaches the sign bit."""
    negated = (magnitude + 0x00800000) >> 31
    return total - tl.sum(tl.sum(negated, 3, keep_dims=True), 0, keep_dims=True)


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
def _warp_sum(v):
    return tl.sum(tl.sum(tl.sum(tl.sum(v, 3), 2), 1), 0)


@triton.jit
def _warp_max(v):
    return tl.max(tl.max(tl.max(tl.max(v, 3), 2), 1), 0)


@triton.jit
def _store(slot, total, weight, factor):
    tl.store(slot, _warp_sum(total * weight).to(tl.float64) * factor)


@triton.jit
def full_statistics(
    x_ptr,
    amax_ptr,
    part_ptr,
    n_rows,
    n_columns,
    stride_row,
    blocks_per_row,
    n_tiles,
    tiles_across,
    n_programs,
    BIAS: tl.constexpr,
    COVERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    BF16: tl.constexpr,
    EXACT: tl.constexpr,
    HIST: tl.constexpr,
    RR: tl.constexpr,
    RL: tl.constexpr,
    CC: tl.constexpr,
    V: tl.constexpr,
    N_SLOTS: tl.constexpr,
):
    """x [n_rows, n_columns] -> bits of amax in x's dtype, one per block, and part float64 [n_programs, N_SLOTS].

    bf16 comes as int16 bits (BF16): a register move widens it, and subnormals survive.
    """
    program = tl.program_id(0)
    ROWS: tl.constexpr = RR * RL
    COLS: tl.constexpr = CC * V
    LANES: tl.constexpr = 32 // V  # neighbouring lanes that hold one row block
    zero = tl.zeros([1, RL, CC, 1], tl.float32)
    none = tl.zeros([1, RL, CC, 1], tl.int32)
    E = none - 127
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
    n_dead = none
    n_zero = none
    n_sat = none
    n_by_scale = none
    n_bad = none
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
        top = (tile // tiles_across) * ROWS
        left = (tile % tiles_across) * COLS
        rows = top + in_row
        cols = left + in_col
        pointers = x_ptr + rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
        if MASK:
            raw = tl.load(pointers, mask=(rows[:, None] < n_rows) & (cols[None, :] < n_columns), other=0)
        else:
            raw = tl.load(pointers)
        bits = (raw.to(tl.int32) << 16) if BF16 else raw.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.reshape(bits, [RR, RL, CC, V])
        magnitude = bits & 0x7FFFFFFF
        if COLUMNS:
            am = tl.max(tl.max(magnitude, axis=0, keep_dims=True), axis=1, keep_dims=True)
            # stored through the pointers' layout of the load, so that no lane hands a value to another
            slots = (tile // tiles_across).to(tl.int64) * n_columns + cols[None, :] + rows[:, None] * 0
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
            wanted = (rows[:, None] < n_rows) & (block < blocks_per_row)[None, :] & (lane % LANES == 0)[None, :]
            tl.store(
                amax_ptr + tl.reshape(slots, [RR, RL, CC, 1]),
                _narrow(am, BF16, EXACT),
                mask=tl.reshape(wanted, [RR, RL, CC, 1]),
            )
        bad = am >= 0x7F800000
        n_bad = _count_nonfinite(n_bad, magnitude)
        m = tl.where(bad, 0, am)
        exponent = tl.maximum(((m + BIAS) >> 23) - 2, 0)  # at most 253, from the largest fp32
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        a = m.to(tl.float32, bitcast=True) * inverse
        ratio = 6.0 / tl.where(m > 0, a, 1.0)
        bits = tl.where(bad, 0, bits)
        x = bits & 0x7FFFFFFF
        sign = bits & -2147483648
        u = x.to(tl.float32, bitcast=True) * inverse

        c = tl.minimum(_rne(u), 6.0)
        c_star = _rne(_ideal_ratio(u, a, ratio, EXACT))
        ideal = c_star * a
        r = tl.fma(u, -6.0, ideal)
        b = tl.fma(c, 6.0, -ideal)
        if EXACT:  # c_star * a of fp32 has 26 bits
            rest = tl.fma(c_star, a, -ideal)
            r += rest
            b -= rest
        e = c - u
        on_d = c_star == 0.0
        at_zero = c == 0.0
        d = tl.where(on_d, r, 0.0)
        g = tl.where(on_d, 0.0, r)
        signed = (e.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)

        scale = tl.where(m > 0, exponent - 127, -127)
        if COLUMNS:
            E_new = tl.maximum(E, tl.max(scale, axis=3, keep_dims=True))
        else:
            E_new = tl.maximum(E, tl.max(scale, axis=0, keep_dims=True))
        w1 = _pow2(tl.maximum(scale - E_new, -126))
        f1 = _pow2(tl.maximum(E - E_new, -126))
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
        z2 = _fold(z2, tl.where(at_zero, u * u, 0.0), w2, f2, COLUMNS)
        e1 = _fold(e1, signed, w1, f1, COLUMNS)
        n_dead = _count(n_dead, on_d & (x != 0))
        n_zero = _count(n_zero, at_zero & (x != 0))
        if not COVERS:
            sat = u > 6.0
            bd = _fold(bd, b * d, w2, f2, COLUMNS)
            b2_sat = _fold(b2_sat, tl.where(sat, b * b, 0.0), w2, f2, COLUMNS)
            e2_d = _fold(e2_d, tl.where(on_d, e * e, 0.0), w2, f2, COLUMNS)
            e2_sat = _fold(e2_sat, tl.where(sat, e * e, 0.0), w2, f2, COLUMNS)
            n_sat = _count(n_sat, sat)
            n_by_scale = _count(n_by_scale, at_zero & (c_star != 0.0))
        if HIST:
            top_bits = c.to(tl.int32, bitcast=True) >> 22  # .5 -> 0xFC, 1 -> 0xFE, 1.5 -> 0xFF, 2 -> 0x100, ...
            one = 1 << (tl.maximum(top_bits - 0xFC, tl.minimum(top_bits, 1)) * 4)
            every = tl.sum(one, 3, keep_dims=True)  # V <= 8 codes in eight 4-bit counters
            minus = tl.sum(one & (bits >> 31), 3, keep_dims=True)
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
    w1 = _pow2(tl.maximum(E - E_top, -126))
    w2 = w1 * w1
    F1 = ((E_top.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    F2 = ((2 * E_top.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    out = part_ptr + program * N_SLOTS
    _store(out + 0, x2, w2, F2)
    _store(out + 1, xe, w2, F2)
    _store(out + 2, xr, w2, F2)
    _store(out + 3, e2, w2, F2)
    _store(out + 4, b2, w2, F2)
    _store(out + 5, g2, w2, F2)
    _store(out + 6, d2, w2, F2)
    _store(out + 7, bg, w2, F2)
    _store(out + 8, z2, w2, F2)
    _store(out + 9, e1, w1, F1)
    if not COVERS:
        _store(out + 10, bd, w2, F2)
        _store(out + 11, b2_sat, w2, F2)
        _store(out + 12, e2_d, w2, F2)
        _store(out + 13, e2_sat, w2, F2)
        tl.store(out + 16, _warp_sum(n_sat).to(tl.float64))
        tl.store(out + 17, _warp_sum(n_by_scale).to(tl.float64))
    tl.store(out + 14, _warp_sum(n_dead).to(tl.float64))
    tl.store(out + 15, _warp_sum(n_zero).to(tl.float64))
    tl.store(out + 18, _warp_sum(n_bad).to(tl.float64))
    if HIST:
        tl.store(out + 19, _warp_sum(p0 & 0xFFFF).to(tl.float64))
        tl.store(out + 20, _warp_sum(p1 & 0xFFFF).to(tl.float64))
        tl.store(out + 21, _warp_sum(p2 & 0xFFFF).to(tl.float64))
        tl.store(out + 22, _warp_sum(p3 & 0xFFFF).to(tl.float64))
        tl.store(out + 23, _warp_sum(p0 >> 16).to(tl.float64))
        tl.store(out + 24, _warp_sum(p1 >> 16).to(tl.float64))
        tl.store(out + 25, _warp_sum(p2 >> 16).to(tl.float64))
        tl.store(out + 26, _warp_sum(p3 >> 16).to(tl.float64))
        tl.store(out + 27, _warp_sum(m0 & 0xFFFF).to(tl.float64))
        tl.store(out + 28, _warp_sum(m1 & 0xFFFF).to(tl.float64))
        tl.store(out + 29, _warp_sum(m2 & 0xFFFF).to(tl.float64))
        tl.store(out + 30, _warp_sum(m3 & 0xFFFF).to(tl.float64))
        tl.store(out + 31, _warp_sum(m0 >> 16).to(tl.float64))
        tl.store(out + 32, _warp_sum(m1 >> 16).to(tl.float64))
        tl.store(out + 33, _warp_sum(m2 >> 16).to(tl.float64))
        tl.store(out + 34, _warp_sum(m3 >> 16).to(tl.float64))


LITE_SLOTS = 5
"""sum u^2, sum e^2, zeroed, saturated, non-finite."""


@triton.jit
def lite_statistics(
    x_ptr,
    amax_ptr,
    part_ptr,
    n_rows,
    n_columns,
    stride_row,
    n_tiles,
    tiles_across,
    n_programs,
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
    """Always-on statistics of row blocks: x [n_rows, n_columns] -> amax bits int32 and part float64 [., N_SLOTS].

    amax is one a program, over the finite blocks. No ideal quantizer, no histogram, no signed sum.
    """
    program = tl.program_id(0)
    LANES: tl.constexpr = 32 // V
    zero = tl.zeros([1, RL, CC, 1], tl.float32)
    none = tl.zeros([1, RL, CC, 1], tl.int32)
    E = none - 127
    x2 = zero
    e2 = zero
    n_zero = none
    n_sat = none
    n_bad = none
    peak = none
    in_row = tl.arange(0, RR * RL)
    in_col = tl.arange(0, CC * V)
    for tile in range(program, n_tiles, n_programs):
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
        n_bad = _count_nonfinite(n_bad, magnitude)
        bad = am >= 0x7F800000
        m = tl.where(bad, 0, am)
        peak = tl.maximum(peak, tl.max(m, axis=0, keep_dims=True))
        exponent = tl.maximum(((m + BIAS) >> 23) - 2, 0)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        x = tl.where(bad, 0, magnitude)
        u = x.to(tl.float32, bitcast=True) * inverse
        c = tl.minimum(_rne(u), 6.0)
        e = c - u
        scale = tl.where(m > 0, exponent - 127, -127)
        E_new = tl.maximum(E, tl.max(scale, axis=0, keep_dims=True))
        w = _pow2(tl.maximum(scale - E_new, -126))
        fade = _pow2(tl.maximum(E - E_new, -126))
        E = E_new
        x2 = _fold(x2, u * u, w * w, fade * fade, False)
        e2 = _fold(e2, e * e, w * w, fade * fade, False)
        n_zero = _count(n_zero, (c == 0.0) & (x != 0))
        if not COVERS:
            n_sat = _count(n_sat, u > 6.0)
    E_top = _warp_max(E)
    w = _pow2(tl.maximum(E - E_top, -126))
    factor = ((2 * E_top.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    out = part_ptr + program * N_SLOTS
    _store(out + 0, x2, w * w, factor)
    _store(out + 1, e2, w * w, factor)
    tl.store(out + 2, _warp_sum(n_zero).to(tl.float64))
    tl.store(out + 3, _warp_sum(n_sat).to(tl.float64))
    tl.store(out + 4, _warp_sum(n_bad).to(tl.float64))
    tl.store(amax_ptr + program, _warp_max(peak))
