"""The exact decomposition in plain torch, float64, any device with float64, chunked. Shipped.

    e       = Q(x) - x                              the quantizer's error
    e_scale = Q(x) - Q*(x)                          scale bias       Q*: the same grid under s* = amax / qmax
    e_dz    = Q*(x) - x   where Q* = 0, x != 0      deadzone (D)
    e_grid  = Q*(x) - x   elsewhere                 grid noise

Source: arXiv 2605.20402. z* is computed as qmax * x / amax: the product is exact in float64 and the division
is correctly rounded, so a ratio that lies on a rounding tie is found to lie on it, and no other is.

Never synchronises, never touches the global RNG, records nothing for autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from mxprobe_kernels.blocks import block_sizes, from_blocks, pad_rows, rows_of, tiles, to_blocks
from mxprobe_kernels.columns import CODE_BINS, DELTA_BINS
from mxprobe_kernels.decomposition import Decomposition, combine, empty, pack
from mxprobe_kernels.formats import E2M1_GRID, Format, Rule, ScaleType, get_format, get_rule
from mxprobe_kernels.rounding import (
    E8M0_BIAS,
    amax_bits,
    e2m1_code,
    hif4_reciprocal,
    hif4_scale,
    power_of_two,
    round_hif4,
    round_minifloat,
    round_to_grid,
    scale_exponent,
    tensor_unit,
)

CPU_TILE_ELEMENTS = 1 << 14
"""On a CPU a tile and its float64 temporaries stay in the second-level cache, and below the size at which torch
shares an operation among threads: sharing sixty short operations a tile costs more than it gains."""
DEVICE_TILE_ELEMENTS = 1 << 24
"""On a GPU a tile is as large as memory for its temporaries (about 3 GiB) allows."""

_E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9


class Scales(NamedTuple):
    """Per block, all [R, N, 1]: what the quantizer divides by, and what a perfect one would."""

    amax: torch.Tensor
    """float64, 0 for zero and excluded blocks."""
    scale: torch.Tensor
    """float64 s."""
    exponent: torch.Tensor
    """int32, e of s = 2^e; -127 for zero and excluded blocks, and where s is no power of two."""
    clamped: torch.Tensor
    """bool: s left the range of the scale type."""
    excluded: torch.Tensor
    """bool: the block holds a NaN or an infinity."""


class ErrorFields(NamedTuple):
    """The decomposition element by element, tensors shaped like x; float64 unless said otherwise."""

    x: torch.Tensor
    """The input, 0 in excluded blocks so that products with it stay finite."""
    q: torch.Tensor
    """Q(x), 0 in excluded blocks."""
    q_star: torch.Tensor
    """Q*(x), the ideal-scale quantizer."""
    on_d: torch.Tensor
    """bool: x != 0 and Q* = 0, the deadzone D."""
    zeroed: torch.Tensor
    """bool: x != 0 and Q = 0."""
    saturated: torch.Tensor
    """bool: |x| > qmax s."""
    code: torch.Tensor
    """uint8: sign * 8 + E2M1 code; 0 for other element types."""
    scales: Scales
    """Per block."""
    counts: torch.Tensor
    """int64[4]: n, n_nonfinite, n_blocks, n_blocks_excluded."""
    format: Format
    rule: Rule

    @property
    def e(self) -> torch.Tensor:
        return self.q - self.x

    @property
    def e_scale(self) -> torch.Tensor:
        return self.q - self.q_star

    @property
    def e_dz(self) -> torch.Tensor:
        return (self.q_star - self.x) * self.on_d

    @property
    def e_grid(self) -> torch.Tensor:
        return (self.q_star - self.x) * ~self.on_d

    def decomposition(self) -> Decomposition:
        """Return the sums of these fields, without computing them a second time."""
        return Decomposition(_sums(self), self.format.name, self.rule.value)


@torch.no_grad()
def decompose(x: torch.Tensor, format: Format, rule: Rule, dim: int) -> Decomposition:
    """Return all sums of x [any shape], blocks along `dim`, in float64: the identity holds to 1e-12 of sum_x2."""
    rows = rows_of(x, dim)
    tensor_amax = finite_amax(rows) if format.tensor_scale else None
    limit = CPU_TILE_ELEMENTS if x.device.type == "cpu" else DEVICE_TILE_ELEMENTS
    parts = [
        _sums(
            fields_of(
                pad_rows(tile, format.block, format.block_rows),
                block_sizes(tile.shape, format, x.device),
                format,
                rule,
                tensor_amax,
            )
        )
        for tile in tiles(rows, format.block, limit, format.block_rows)
    ]
    values = combine(torch.stack(parts)) if parts else empty(x.device)
    return Decomposition(values, format.name, rule.value)


@torch.no_grad()
def error_fields(
    x: torch.Tensor, *, format: str | Format = "mxfp4", rule: str | Rule = "rceil", dim: int = -1
) -> ErrorFields:
    """Return the decomposition of x element by element, tensors shaped like x; it takes about 60 bytes an element.

    `.decomposition()` has its sums. x and errors as for `decompose` in `frontend`.
    """
    format, rule = get_format(format), get_rule(rule)
    blocks, shape = to_blocks(x, dim, format.block, format.block_rows)
    tensor_amax = finite_amax(blocks) if format.tensor_scale else None
    sizes = block_sizes((prod(shape.moved[:-1]), shape.moved[-1]), format, x.device)
    fields = fields_of(blocks, sizes, format, rule, tensor_amax)
    return fields._replace(**{name: from_blocks(getattr(fields, name), shape) for name in _ELEMENTWISE})


def quantized_blocks(blocks: torch.Tensor, format: Format, rule: Rule) -> tuple[torch.Tensor, Scales]:
    """Return Q of blocks, float32 [R, N, B], in float64 (NaN in excluded blocks), and the scales."""
    scales = _scales(blocks, format, rule, finite_amax(blocks) if format.tensor_scale else None)
    z = _scaled(blocks.abs().double().masked_fill_(scales.excluded, 0.0), scales.scale, format)
    q = torch.copysign(_round(z, format).mul_(scales.scale), blocks.double())
    return q.masked_fill_(scales.excluded, float("nan")), scales


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| over the finite elements, float32 []; 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax()


_ELEMENTWISE = ("x", "q", "q_star", "on_d", "zeroed", "saturated", "code")


def _scales(blocks: torch.Tensor, format: Format, rule: Rule, tensor_amax: torch.Tensor | None) -> Scales:
    bits, excluded = amax_bits(blocks)
    scales = _scales_of(bits, excluded, format, rule, tensor_amax, target=6.0)
    if not format.four_over_six:
        return scales
    to_four = _scales_of(bits, excluded, format, Rule.FLOOR, tensor_amax, target=4.0)
    magnitude = blocks.abs().double().masked_fill_(excluded, 0.0)
    better = _squared_error(magnitude, to_four.scale, format) < _squared_error(magnitude, scales.scale, format)
    return Scales(scales.amax, *(torch.where(better, b, a) for a, b in zip(scales[1:], to_four[1:])))


def _scales_of(
    bits: torch.Tensor,
    excluded: torch.Tensor,
    format: Format,
    rule: Rule,
    tensor_amax: torch.Tensor | None,
    target: float,
) -> Scales:
    """Scales of blocks by the bits of their amax; `target` is where Four-over-Six maps amax, if scales are E4M3."""
    amax = bits.view(torch.float32).double()
    if format.scale is ScaleType.E8M0:
        exponent, clamped = scale_exponent(bits, format, rule)
        return Scales(amax, power_of_two(exponent), exponent, clamped, excluded)
    exponent = torch.full_like(bits, -E8M0_BIAS)
    if format.scale is ScaleType.E6M2:
        scale, clamped = hif4_scale(amax)
        return Scales(amax, scale, exponent, clamped, excluded)
    if tensor_amax is None:
        ideal = (amax / format.qmax).float().double()
        scale = torch.where(ideal > 0, ideal, 1.0)
        return Scales(amax, scale, exponent, (ideal == 0) & (bits != 0), excluded)
    unit = tensor_unit(tensor_amax, format)
    step = round_minifloat(amax / (target if format.four_over_six else format.qmax) / unit, 3, -6, _E4M3_MAX)
    flushed = (step == 0) & (bits != 0)
    return Scales(amax, step.clamp(min=_E4M3_SMALLEST) * unit, exponent, flushed, excluded)


def _scaled(magnitude: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """|x| / s as the format's converter computes it."""
    if format.scale is ScaleType.E6M2:
        return magnitude * hif4_reciprocal(scale)
    return magnitude / scale


def _round(z: torch.Tensor, format: Format) -> torch.Tensor:
    """z = |x| / s, float64 [R, N, B] -> element values."""
    return round_hif4(z) if format.scale is ScaleType.E6M2 else round_to_grid(z, format)


def _squared_error(magnitude: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """float64 [R, N, B] -> [R, N, 1]. Added by halves, so that every backend finds the same bits."""
    total = (_round(magnitude / scale, format) * scale - magnitude).square()
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total


def fields_of(
    blocks: torch.Tensor, sizes: torch.Tensor, format: Format, rule: Rule, tensor_amax: torch.Tensor | None
) -> ErrorFields:
    """Return the fields, shaped like the blocks, of float32 [R, N, B]; sizes [R or 1, N or 1] count real elements."""
    scales = _scales(blocks, format, rule, tensor_amax)
    x = blocks.double().masked_fill_(scales.excluded, 0.0)
    magnitude = x.abs()
    z = _scaled(magnitude, scales.scale, format)
    saturated = z > format.qmax
    c = _round(z, format)
    ideal = torch.where(scales.amax > 0, scales.amax, 1.0)
    c_star = _round((magnitude * format.qmax).div_(ideal), format)
    nonzero = magnitude != 0
    if format.grid == E2M1_GRID:
        code = e2m1_code(c).to(torch.uint8) + torch.signbit(x).to(torch.uint8) * (CODE_BINS // 2)
    else:
        code = torch.zeros_like(c, dtype=torch.uint8)
    counts = torch.stack(
        (
            (sizes[:, :, None] * ~scales.excluded).sum(),
            (~torch.isfinite(blocks)).sum(),
            torch.full((), scales.excluded.numel(), dtype=torch.int64, device=blocks.device),
            scales.excluded.sum(),
        )
    )
    return ErrorFields(
        x=x,
        q=torch.copysign(c * scales.scale, x),
        q_star=torch.copysign(c_star * ideal / format.qmax, x),
        on_d=(c_star == 0) & nonzero,
        zeroed=(c == 0) & nonzero,
        saturated=saturated,
        code=code,
        scales=scales,
        counts=counts,
        format=format,
        rule=rule,
    )


def energies(f: ErrorFields) -> Iterator[torch.Tensor]:
    """Yield the terms of `columns.ENERGY_SUMS`, element by element, one tensor at a time."""
    e, e_scale, e_star = f.q - f.x, f.q - f.q_star, f.q_star - f.x
    e_dz = e_star * f.on_d
    e_grid = e_star - e_dz
    e2, scale2 = e * e, e_scale * e_scale
    yield f.x * f.x
    yield e2
    yield scale2
    yield e_dz * e_dz
    yield e_grid * e_grid
    yield e_scale * e_grid
    yield e_scale * e_dz
    yield f.x * f.q
    yield f.x * f.q_star
    yield e
    yield scale2 * f.saturated
    yield e2 * f.on_d
    yield e2 * f.zeroed
    yield e2 * f.saturated


def flags(f: ErrorFields) -> tuple[torch.Tensor, ...]:
    """Return bool by element: in the deadzone, zeroed, zeroed by the scale, saturated."""
    return f.on_d, f.zeroed, f.zeroed & ~f.on_d, f.saturated


def _sums(f: ErrorFields) -> torch.Tensor:
    """Fields (of any element shape) -> float64[N_VALUES]."""
    sums = torch.stack([energy.sum() for energy in energies(f)])
    n, n_nonfinite, n_blocks, n_excluded = f.counts.unbind()
    of_elements = [flag.sum() for flag in flags(f)]
    counts = torch.stack((n, *of_elements, f.scales.clamped.sum(), n_nonfinite, n_blocks, n_excluded))
    if f.format.grid == E2M1_GRID:
        codes = count_codes(f.code)
        codes[0] -= f.code.numel() - n  # padding and excluded blocks were set to +0
    else:
        codes = torch.zeros(CODE_BINS, dtype=torch.int64, device=f.x.device)
    amax = f.scales.amax.amax() if f.scales.amax.numel() else f.x.new_zeros(())
    return pack(sums, counts, amax, delta_histogram(f.scales.amax, f.scales.scale, f.format), codes)


def count_codes(code: torch.Tensor) -> torch.Tensor:
    """Count uint8 codes below 16, int64 [16]. On a GPU bincount would synchronise, so there they are compared."""
    flat = code.reshape(-1)
    if code.device.type == "cpu":
        return torch.bincount(flat, minlength=CODE_BINS)
    return torch.stack([(flat == value).sum() for value in range(CODE_BINS)])


def delta_histogram(amax: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """Count blocks by delta = log2(s / s*) in 32 bins over [0, 1), int64 [32], without zero and excluded blocks."""
    above = (_above_edges(amax.reshape(-1), scale.reshape(-1), format) & (amax.reshape(-1, 1) > 0)).sum(0)
    at_least = torch.cat(((amax > 0).sum().reshape(1), above, above.new_zeros(1)))
    return at_least[:-1] - at_least[1:]


def delta_bins(amax: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the bin of each block in that histogram, int64, shaped like amax; meaningless where amax is 0."""
    return _above_edges(amax, scale, format).sum(-1)


def _above_edges(amax: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """bool [..., 31]: whether s / s* reaches 2^(k/32). Irrational but the first, so that comparing is unambiguous."""
    ratio = scale * format.qmax / torch.where(amax > 0, amax, 1.0)
    edges = torch.exp2(torch.arange(1, DELTA_BINS, dtype=torch.float64, device=amax.device) / DELTA_BINS)
    return ratio.unsqueeze(-1) >= edges
