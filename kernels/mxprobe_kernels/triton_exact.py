# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The decomposition of any format in float64, in one pass: what `torch_backend` computes, without its temporaries.

    c = round(|x| / s)    Q = s c          c* = round(qmax |x| / amax)    Q* = c* amax / qmax
    e = Q - |x|           e_scale = Q - Q*           e_dz, e_grid = Q* - |x| on and off D = [x != 0, c* = 0]

For formats beside MXFP4, whose scales are real numbers; and for the rare MXFP4 tensor that the fast kernel flags. Half
the speed of float32 where a GPU has float64 units, a sixty-fourth on others: still one read of x for sixty passes.
"""

import triton
import triton.language as tl

from mxprobe_kernels.columns import ENERGY_SUMS
from mxprobe_kernels.triton_formats import block_scales, finite_amax, float_bits, rounded, scaled

COUNT_SLOTS = ("n_deadzone", "n_zeroed", "n_zeroed_by_scale", "n_saturated", "n_clamped", "n_nonfinite")
EXACT_CODE_SLOT = len(ENERGY_SUMS) + len(COUNT_SLOTS)
EXACT_SLOTS = EXACT_CODE_SLOT + 16
MAX_EXACT_TILES = 256
"""A program's, so that the 16-bit counters of the code histogram hold."""


@triton.jit
def _total(total, value):
    return total + tl.sum(value, 1)


@triton.jit
def _number(total, condition):
    return total + tl.sum(condition.to(tl.int32), 1)


@triton.jit
def exact_statistics(
    x_ptr,
    amax_ptr,
    scale_ptr,
    part_ptr,
    flag_ptr,
    unit_ptr,
    offsets_ptr,
    n_rows,
    n_columns,
    stride_row,
    stride_column,
    blocks_per_row,
    GROUPED_COLUMNS: tl.constexpr,
    SQUARE: tl.constexpr,
    CODES: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    FLOOR_BIAS: tl.constexpr,
    EMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TOP: tl.constexpr,
    TWO: tl.constexpr,
    N_SLOTS: tl.constexpr,
):
    """x [n_rows, n_columns], blocks of BLOCK along columns -> part float64 [groups, programs, N_SLOTS].

    amax (bits of float32, infinite or NaN in excluded blocks) and scale (float64) of each block go to `amax_ptr` and
    `scale_ptr`, unless None; SQUARE: blocks are BLOCK x BLOCK and their amax is read there. `flag_ptr`: int32 or None;
    where it holds 0 nothing is read and part is left as it was. `unit_ptr`: float64, of formats with a tensor scale.
    `offsets_ptr`: group g is rows, or columns (GROUPED_COLUMNS), offsets[g] to offsets[g + 1]; None for all.
    """
    program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    group = tl.program_id(1)
    first_row = 0
    end_row = n_rows
    first_column = 0
    end_column = n_columns
    if offsets_ptr is not None:
        if GROUPED_COLUMNS:
            first_column = tl.load(offsets_ptr + group).to(tl.int32)
            end_column = tl.load(offsets_ptr + group + 1).to(tl.int32)
        else:
            first_row = tl.load(offsets_ptr + group).to(tl.int32)
            end_row = tl.load(offsets_ptr + group + 1).to(tl.int32)
    across = tl.cdiv(end_column - first_column, BLOCK)
    n_tiles = tl.cdiv(end_row - first_row, ROWS) * across
    if flag_ptr is not None:
        n_tiles *= tl.load(flag_ptr)
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
    zero = tl.zeros([ROWS], tl.float64)
    none = tl.zeros([ROWS], tl.int32)
    x2 = zero
    e2 = zero
    scale2 = zero
    dz2 = zero
    grid2 = zero
    scale_grid = zero
    scale_dz = zero
    xq = zero
    xqstar = zero
    e1 = zero
    sat2 = zero
    e2_on_d = zero
    e2_zeroed = zero
    e2_saturated = zero
    n_dead = none
    n_zero = none
    n_by_scale = none
    n_sat = none
    n_out = none
    n_bad = none
    even = none.to(tl.int64)  # of 16 bits each: codes 0, 2, 4, 6, then those of negative elements
    odd = none.to(tl.int64)
    minus_even = none.to(tl.int64)
    minus_odd = none.to(tl.int64)
    for tile in range(program, n_tiles, n_programs):
        rows = first_row + (tile // across) * ROWS + tl.arange(0, ROWS)
        block = tile % across
        columns = first_column + block * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < end_row)[:, None]
        pointers = x_ptr + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
        bits = float_bits(tl.load(pointers, mask=inside & (columns < end_column)[None, :], other=0), BF16)
        if SQUARE:
            slots = (rows // BLOCK)[:, None] * blocks_per_row + block
            largest = tl.load(amax_ptr + slots, mask=inside, other=0)
            finite = largest < 0x7F800000
            amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
        else:
            slots = rows.to(tl.int64)[:, None] * blocks_per_row + block
            amax, finite = finite_amax(bits)
            if amax_ptr is not None:
                tl.store(amax_ptr + slots, tl.max(bits & 0x7FFFFFFF, 1, keep_dims=True), mask=inside)
        n_bad = _number(n_bad, (bits & 0x7FFFFFFF) >= 0x7F800000)
        bits = tl.where(finite, bits, 0)
        x = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True).to(tl.float64)
        scale, out = block_scales(x, amax, unit, ROWS, BLOCK, SCALE, BIAS, FLOOR_BIAS, EMAX, MANTISSA, LEAST, TOP, TWO)
        if scale_ptr is not None:
            tl.store(scale_ptr + slots, scale, mask=inside)
        one_row = inside & (rows % BLOCK == 0)[:, None] if SQUARE else inside
        n_out += tl.sum(tl.where(one_row, out, 0), 1)
        ideal = tl.where(amax > 0, amax, 1.0).to(tl.float64)
        z = scaled(x, scale, SCALE)
        c = rounded(z, ROWS, SCALE, MANTISSA, LEAST, TOP)
        c_star = rounded(x * TOP / ideal, ROWS, SCALE, MANTISSA, LEAST, TOP)
        q = c * scale
        q_star = c_star * ideal / TOP
        e = q - x
        e_scale = q - q_star
        on_d = (c_star == 0.0) & (x != 0.0)
        zeroed = (c == 0.0) & (x != 0.0)
        saturated = z > TOP
        e_dz = tl.where(on_d, q_star - x, 0.0)
        e_grid = tl.where(on_d, 0.0, q_star - x)
        x2 = _total(x2, x * x)
        e2 = _total(e2, e * e)
        scale2 = _total(scale2, e_scale * e_scale)
        dz2 = _total(dz2, e_dz * e_dz)
        grid2 = _total(grid2, e_grid * e_grid)
        scale_grid = _total(scale_grid, e_scale * e_grid)
        scale_dz = _total(scale_dz, e_scale * e_dz)
        xq = _total(xq, x * q)
        xqstar = _total(xqstar, x * q_star)
        e1 = _total(e1, tl.where(bits < 0, -e, e))
        sat2 = _total(sat2, tl.where(saturated, e_scale * e_scale, 0.0))
        e2_on_d = _total(e2_on_d, tl.where(on_d, e * e, 0.0))
        e2_zeroed = _total(e2_zeroed, tl.where(zeroed, e * e, 0.0))
        e2_saturated = _total(e2_saturated, tl.where(saturated, e * e, 0.0))
        n_dead = _number(n_dead, on_d)
        n_zero = _number(n_zero, zeroed)
        n_by_scale = _number(n_by_scale, zeroed & (c_star != 0.0))
        n_sat = _number(n_sat, saturated)
        if CODES:
            code = tl.minimum(tl.minimum(c * 2, c + 2), c * 0.5 + 4).to(tl.int64)
            one = (code * 0 + 1) << (code * 8)
            minus = tl.sum(tl.where(bits < 0, one, 0), 1)
            plus = tl.sum(one, 1) - minus
            even += plus & 0x00FF00FF00FF00FF
            odd += (plus >> 8) & 0x00FF00FF00FF00FF
            minus_even += minus & 0x00FF00FF00FF00FF
            minus_odd += (minus >> 8) & 0x00FF00FF00FF00FF
    if n_tiles > 0:
        out_ptr = part_ptr + (group * n_programs + program) * N_SLOTS
        tl.store(out_ptr + 0, tl.sum(x2, 0))
        tl.store(out_ptr + 1, tl.sum(e2, 0))
        tl.store(out_ptr + 2, tl.sum(scale2, 0))
        tl.store(out_ptr + 3, tl.sum(dz2, 0))
        tl.store(out_ptr + 4, tl.sum(grid2, 0))
        tl.store(out_ptr + 5, tl.sum(scale_grid, 0))
        tl.store(out_ptr + 6, tl.sum(scale_dz, 0))
        tl.store(out_ptr + 7, tl.sum(xq, 0))
        tl.store(out_ptr + 8, tl.sum(xqstar, 0))
        tl.store(out_ptr + 9, tl.sum(e1, 0))
        tl.store(out_ptr + 10, tl.sum(sat2, 0))
        tl.store(out_ptr + 11, tl.sum(e2_on_d, 0))
        tl.store(out_ptr + 12, tl.sum(e2_zeroed, 0))
        tl.store(out_ptr + 13, tl.sum(e2_saturated, 0))
        tl.store(out_ptr + 14, tl.sum(n_dead, 0).to(tl.float64))
        tl.store(out_ptr + 15, tl.sum(n_zero, 0).to(tl.float64))
        tl.store(out_ptr + 16, tl.sum(n_by_scale, 0).to(tl.float64))
        tl.store(out_ptr + 17, tl.sum(n_sat, 0).to(tl.float64))
        tl.store(out_ptr + 18, tl.sum(n_out, 0).to(tl.float64))
        tl.store(out_ptr + 19, tl.sum(n_bad, 0).to(tl.float64))
        if CODES:
            for k in tl.static_range(4):
                tl.store(out_ptr + 20 + 2 * k, tl.sum((even >> (16 * k)) & 0xFFFF, 0).to(tl.float64))
                tl.store(out_ptr + 21 + 2 * k, tl.sum((odd >> (16 * k)) & 0xFFFF, 0).to(tl.float64))
                tl.store(out_ptr + 28 + 2 * k, tl.sum((minus_even >> (16 * k)) & 0xFFFF, 0).to(tl.float64))
                tl.store(out_ptr + 29 + 2 * k, tl.sum((minus_odd >> (16 * k)) & 0xFFFF, 0).to(tl.float64))


@triton.jit
def square_amax(
    x_ptr,
    amax_ptr,
    n_rows,
    n_columns,
    stride_row,
    stride_column,
    blocks_per_row,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bits of max|x| of each BLOCK x BLOCK square, into int32 [.., blocks_per_row] of zeros. ROWS divides BLOCK."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    block = tl.program_id(1)
    columns = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    pointers = x_ptr + rows[:, None] * stride_row + columns[None, :] * stride_column
    bits = float_bits(tl.load(pointers, mask=(rows < n_rows)[:, None] & (columns < n_columns)[None, :], other=0), BF16)
    largest = tl.max(tl.max(bits & 0x7FFFFFFF, 1), 0)
    tl.atomic_max(amax_ptr + tl.program_id(0) * ROWS // BLOCK * blocks_per_row + block, largest)
