# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Error energies of a tensor under one correction, in one pass and in float64: the arithmetic of `corrections`.

x^ = Q'(x)                      another rule or format
x^ = Q(f x) / f                 f = 1 + m8 / 256 of a macro block
x^ = Q(x) + alpha Q(x - Q(x))
x^ = H^T Q(H x)                 by butterflies in float32, in the order of `corrections.walsh_hadamard`
x^ = Q(x) with floor(. + U)     U by Philox, as in `stochastic`: the mean over draws
"""

import triton
import triton.language as tl

from mxprobe_kernels.triton_formats import (
    _minifloat,
    _pow2,
    block_scales,
    finite_amax,
    float_bits,
    rounded,
    scaled,
)

FORMAT, MACRO, FALLBACK, HADAMARD, STOCHASTIC = (tl.constexpr(kind) for kind in range(5))


@triton.jit
def _signed(magnitude, sign_of):
    bits = sign_of.to(tl.int64, bitcast=True) & -9223372036854775808
    return (magnitude.to(tl.int64, bitcast=True) | bits).to(tl.float64, bitcast=True)


@triton.jit
def _blocks_scale(x, BIAS: tl.constexpr):
    """x float32 [N, 32] -> MXFP4 scale float64 [N, 1], and whether the block is finite."""
    amax, finite = finite_amax(x.to(tl.int32, bitcast=True))
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(((bits + BIAS) >> 23) - 129, -127), 127)
    return _pow2(tl.where(bits == 0, -127, exponent)), finite


@triton.jit
def _mxfp4(x, BIAS: tl.constexpr):
    """Q of float32 [N, 32], float64; NaN in blocks that are not finite."""
    scale, finite = _blocks_scale(x, BIAS)
    wide = x.to(tl.float64)
    q = _minifloat(tl.where(finite, tl.abs(wide), 0.0) / scale, 1, 0, 6.0) * scale
    return tl.where(finite, _signed(q, wide), float("nan"))


@triton.jit
def _macro_block(x, BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x float32 [ROWS, WIDTH], a macro block a row -> float32."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    usable = (largest > 0) & (largest < 0x7F800000)
    amax = tl.where(usable, largest, 0x3F800000).to(tl.float32, bitcast=True)
    # Rounded once to float64 and once to float32 is rounded once: 53 >= 2 * 24 + 2 bits.
    ratio = (6.0 / amax.to(tl.float64)).to(tl.float32)
    m8 = (ratio.to(tl.int32, bitcast=True) & 0x7F8000) >> 15
    f = tl.where(usable, 1.0 + m8.to(tl.float32) / 256.0, 1.0)
    q = _mxfp4(tl.reshape(x * f, [ROWS * WIDTH // 32, 32]), BIAS)
    return (tl.reshape(q, [ROWS, WIDTH]) / f.to(tl.float64)).to(tl.float32)


@triton.jit
def _butterfly(y, N: tl.constexpr, HALF: tl.constexpr):
    """Pairs (a, b) of elements HALF apart -> (a + b, a - b); y float32 with N * 2 * HALF elements."""
    pairs = tl.reshape(y, [N, 2, HALF])
    second = tl.arange(0, 2)[None, :, None]
    added = tl.sum(pairs, 1, keep_dims=True)
    taken = tl.sum(tl.where(second == 0, pairs, -pairs), 1, keep_dims=True)
    return tl.where(second == 0, added, taken)


@triton.jit
def _walsh(y, N: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """y float32 [N, SIZE] -> its normalised Hadamard transform."""
    y = _butterfly(y, N * SIZE // 2, 1)
    if SIZE >= 4:
        y = _butterfly(y, N * SIZE // 4, 2)
    if SIZE >= 8:
        y = _butterfly(y, N * SIZE // 8, 4)
    if SIZE >= 16:
        y = _butterfly(y, N * SIZE // 16, 8)
    if SIZE >= 32:
        y = _butterfly(y, N * SIZE // 32, 16)
    if SIZE >= 64:
        y = _butterfly(y, N * SIZE // 64, 32)
    if SIZE >= 128:
        y = _butterfly(y, N * SIZE // 128, 64)
    return tl.reshape(y, [N, SIZE]) * FACTOR


@triton.jit
def _add(n, n_zeroed, e2, e2_on_d, x, corrected, counted, on_d):
    """The sums of one x^; everything [ROWS, WIDTH] but the sums, [ROWS]."""
    counted &= corrected - corrected == 0.0
    error = tl.where(counted, corrected.to(tl.float64) - x.to(tl.float64), 0.0)
    error *= error
    n += tl.sum(counted.to(tl.int32), 1)
    n_zeroed += tl.sum((counted & (corrected == 0.0) & (x != 0.0)).to(tl.int32), 1)
    e2 += tl.sum(error, 1)
    e2_on_d += tl.sum(tl.where(on_d, error, 0.0), 1)
    return n, n_zeroed, e2, e2_on_d


@triton.jit
def correction_errors(
    x_ptr,
    part_ptr,
    unit_ptr,
    signs_ptr,
    alpha_ptr,
    n_rows,
    n_columns,
    stride_row,
    stride_column,
    KIND: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    DRAWS: tl.constexpr,
    SEED: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    FLOOR_BIAS: tl.constexpr,
    EMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TOP: tl.constexpr,
    TWO: tl.constexpr,
):
    """x [n_rows, n_columns], blocks along columns -> part float64 [programs, 4] by `whatif.WHATIF_COLUMNS`.

    BLOCK: of the format, or the size of a rotation (FACTOR: its square root's inverse); it divides WIDTH, which is a
    multiple of 32 and for a macro block its size. `signs_ptr` float32 [BLOCK], `alpha_ptr` and `unit_ptr` float64 [1].
    """
    program = tl.program_id(0)
    N: tl.constexpr = ROWS * WIDTH // 32
    M: tl.constexpr = ROWS * WIDTH // BLOCK
    across = tl.cdiv(n_columns, WIDTH)
    n_tiles = tl.cdiv(n_rows, ROWS) * across
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
    n = tl.zeros([ROWS], tl.int32)
    n_zeroed = tl.zeros([ROWS], tl.int32)
    e2 = tl.zeros([ROWS], tl.float64)
    e2_on_d = tl.zeros([ROWS], tl.float64)
    for tile in range(program, n_tiles, tl.num_programs(0)):
        rows = ((tile // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = ((tile % across) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        pointers = x_ptr + rows[:, None] * stride_row + columns[None, :] * stride_column
        bits = float_bits(tl.load(pointers, mask=inside, other=0), BF16)
        x = bits.to(tl.float32, bitcast=True)
        amax, finite = finite_amax(tl.reshape(bits, [N, 32]))
        magnitude = tl.abs(tl.reshape(x, [N, 32]).to(tl.float64))
        on_d = tl.reshape((magnitude * 6.0 <= amax.to(tl.float64) * 0.25) & (magnitude > 0), [ROWS, WIDTH])
        counted = tl.reshape(tl.broadcast_to(finite, [N, 32]), [ROWS, WIDTH]) & inside
        if KIND == STOCHASTIC:
            scale, _ = _blocks_scale(tl.reshape(x, [N, 32]), BIAS)
            z = tl.reshape(tl.where(finite, magnitude, 0.0) / scale, [ROWS, WIDTH])
            scale = tl.reshape(tl.broadcast_to(scale, [N, 32]), [ROWS, WIDTH])
            step = _pow2(tl.maximum((z.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023, 0) - 1)
            number = rows[:, None] * n_columns + columns[None, :]
            low = (number & 0xFFFFFFFF).to(tl.uint32)
            high = (number >> 32).to(tl.uint32)
            for four in tl.static_range(DRAWS // 4):
                words = tl.philox(SEED, low, high, low * 0 + four, bits)
                for k in tl.static_range(4):
                    uniform = (words[k] >> 8).to(tl.float64) * 5.9604644775390625e-08
                    c = tl.minimum(tl.floor(z / step + uniform) * step, 6.0)
                    q = _signed(c * scale, x.to(tl.float64)).to(tl.float32)
                    n, n_zeroed, e2, e2_on_d = _add(n, n_zeroed, e2, e2_on_d, x, q, counted, on_d)
        else:
            if KIND == MACRO:
                q = _macro_block(x, BIAS, ROWS, WIDTH)
            elif KIND == FALLBACK:
                blocks = tl.reshape(x, [N, 32])
                first = _mxfp4(blocks, BIAS)
                second = _mxfp4((blocks.to(tl.float64) - first).to(tl.float32), BIAS)
                q = tl.reshape((first + tl.load(alpha_ptr) * second).to(tl.float32), [ROWS, WIDTH])
            elif KIND == HADAMARD:
                signs = tl.load(signs_ptr + tl.arange(0, BLOCK))[None, :]
                turned = _walsh(tl.reshape(x, [M, BLOCK]) * signs, M, BLOCK, FACTOR)
                q = _mxfp4(tl.reshape(turned, [N, 32]), BIAS).to(tl.float32)
                q = tl.reshape(_walsh(tl.reshape(q, [M, BLOCK]), M, BLOCK, FACTOR) * signs, [ROWS, WIDTH])
            else:
                own, own_finite = finite_amax(tl.reshape(bits, [M, BLOCK]))
                wide = tl.reshape(x, [M, BLOCK]).to(tl.float64)
                absolute = tl.where(own_finite, tl.abs(wide), 0.0)
                scale, _ = block_scales(
                    absolute, own, unit, M, BLOCK, SCALE, BIAS, FLOOR_BIAS, EMAX, MANTISSA, LEAST, TOP, TWO
                )
                c = rounded(scaled(absolute, scale, SCALE), M, SCALE, MANTISSA, LEAST, TOP)
                q = tl.where(own_finite, _signed(c * scale, wide), float("nan"))
                q = tl.reshape(q.to(tl.float32), [ROWS, WIDTH])
            n, n_zeroed, e2, e2_on_d = _add(n, n_zeroed, e2, e2_on_d, x, q, counted, on_d)
    out = part_ptr + program * 4
    tl.store(out, tl.sum(n, 0).to(tl.float64) / DRAWS)
    tl.store(out + 1, tl.sum(n_zeroed, 0).to(tl.float64) / DRAWS)
    tl.store(out + 2, tl.sum(e2, 0) / DRAWS)
    tl.store(out + 3, tl.sum(e2_on_d, 0) / DRAWS)
