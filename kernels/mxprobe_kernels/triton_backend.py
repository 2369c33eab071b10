# pyright: basic, reportCallIssue=false
"""Launching the Triton kernels, and finishing their sums. Nothing here synchronises or copies to the host.

The kernel leaves per-program partial sums in float64 and the amax of every block; what belongs to a block (scale
exponent, clamps, delta histogram, number of elements counted) is 1/32 of the data and is finished in torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from mxprobe_kernels.blocks import block_lengths, rows_of
from mxprobe_kernels.decomposition import Decomposition, empty, pack
from mxprobe_kernels.formats import MXFP4, Format, Rule
from mxprobe_kernels.rounding import FP32_INF_BITS, power_of_two, scale_exponent
from mxprobe_kernels.torch_backend import delta_histogram
from mxprobe_kernels.triton_kernels import (
    CODE_SLOT,
    LITE_SLOTS,
    MAX_TILES_PER_PROGRAM,
    N_SLOTS,
    full_statistics,
    lite_statistics,
)

PROGRAMS_PER_PROCESSOR = 24
"""Warps in flight that hide the latency of loads at about 80 registers a lane."""

INTERPRETED = 0
"""In place of the lanes of a warp: Triton's interpreter has none, and fewer, larger tiles are quicker there."""


def supports(format: Format) -> bool:
    return format == MXFP4


@torch.no_grad()
def decompose(x: torch.Tensor, format: Format, rule: Rule, dim: int) -> Decomposition:
    """As `torch_backend.decompose`; sums within 1e-6 of float64, codes, counts and histograms exact."""
    if not supports(format):
        raise ValueError(f"the Triton kernels know mxfp4, not {format.name}; use backend='torch'")
    rows = rows_of(x, dim)
    if not rows.numel():
        return Decomposition(empty(x.device), format.name, rule.value)
    if rows.dtype == torch.float64:
        rows = rows.float()
    columns = rows.stride(0) == 1 and rows.stride(1) != 1
    matrix = rows.t() if columns else rows
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return Decomposition(_launch(matrix, rule, columns), format.name, rule.value)


@torch.no_grad()
def lite(x: torch.Tensor, rule: Rule) -> Lite:
    """Always-on statistics of x [..., K], blocks of 32 along the last axis, which must have unit stride.

    A quarter to a third of the instructions of `decompose`. ValueError for a tensor whose last axis is strided: a
    copy would cost more than the statistics.
    """
    rows = rows_of(x, -1)
    if rows.dtype == torch.float64 or (rows.numel() and rows.stride(1) != 1):
        raise ValueError("lite statistics take float32, bfloat16 or float16 with a unit-stride last axis")
    device = x.device
    if not rows.numel():
        return Lite(torch.zeros(LITE_SLOTS, dtype=torch.float64, device=device), torch.zeros((), device=device))
    tile = lite_tile_shape(rows.element_size(), _lanes(device))
    n_tiles, tiles_across, n_programs, mask = _grid(rows, tile, device)
    amax = torch.empty(n_programs, dtype=torch.int32, device=device)
    part = torch.empty((n_programs, LITE_SLOTS), dtype=torch.float64, device=device)
    lite_statistics[(n_programs,)](
        rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows,
        amax,
        part,
        rows.shape[0],
        rows.shape[1],
        rows.stride(0),
        n_tiles,
        tiles_across,
        n_programs,
        BIAS=MXFP4.amax_bias(rule),
        COVERS=rule.covers_amax,
        MASK=mask,
        BF16=rows.dtype == torch.bfloat16,
        N_SLOTS=LITE_SLOTS,
        **tile,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return Lite(part.sum(0), amax.amax().view(torch.float32))


class Lite(NamedTuple):
    """On the device of the input."""

    sums: torch.Tensor
    """float64[5]: sum_x2, sum_e2, n_zeroed, n_saturated, n_nonfinite."""
    amax: torch.Tensor
    """float32 [], over the blocks without NaN or infinity."""


def _lanes(device: torch.device) -> int:
    return INTERPRETED if device.type == "cpu" else 64 if torch.version.hip else 32


def _grid(matrix: torch.Tensor, tile: dict[str, int], device: torch.device) -> tuple[int, int, int, bool]:
    """Tiles in all, tiles across, programs, and whether tiles stick out."""
    rows, columns = tile["RR"] * tile["RL"], tile["CC"] * tile["V"]
    tiles_across = triton.cdiv(matrix.shape[1], columns)
    n_tiles = triton.cdiv(matrix.shape[0], rows) * tiles_across
    n_programs = min(n_tiles, max(_programs_in_flight(device), triton.cdiv(n_tiles, MAX_TILES_PER_PROGRAM)))
    return n_tiles, tiles_across, n_programs, bool(matrix.shape[0] % rows or matrix.shape[1] % columns)


def tile_shape(element_bytes: int, columns: bool, lanes: int, covers: bool) -> dict[str, int]:
    """RR, RL, CC, V of a tile: one warp of `lanes`, 128-bit loads, as many elements a lane as no target spills at.

    Column blocks take the 32 rows of a tile: there RR * RL = 32.
    """
    vector = 16 // element_bytes
    if lanes == INTERPRETED:
        return {"RR": 8, "RL": 4, "CC": 8, "V": vector}
    # AMD keeps one bit a lane of every comparison in scalar registers, and has few; rules that can saturate
    # carry four more sums; columns of fp32 carry the rest of c* a.
    elements = 8 if lanes == 64 or (columns and (not covers or element_bytes == 4)) else 16
    rows_in_registers = max(elements // vector, 1)
    row_lanes = 32 // rows_in_registers if columns else lanes // 8
    return {"RR": rows_in_registers, "RL": row_lanes, "CC": lanes // row_lanes, "V": vector}


def lite_tile_shape(element_bytes: int, lanes: int) -> dict[str, int]:
    """Row tiles of the lite kernel, whose few sums leave NVIDIA's registers room for twice the rows."""
    tile = tile_shape(element_bytes, False, lanes, covers=True)
    return {**tile, "RR": tile["RR"] * 2} if lanes == 32 else tile


def kernel_options(rule: Rule, dtype: torch.dtype, columns: bool, lanes: int, mask: bool) -> dict[str, object]:
    """The constexpr arguments of `full_statistics`."""
    return {
        "BIAS": MXFP4.amax_bias(rule),
        "COVERS": rule.covers_amax,
        "COLUMNS": columns,
        "MASK": mask,
        "BF16": dtype == torch.bfloat16,
        "EXACT": dtype == torch.float32,
        "HIST": True,
        "N_SLOTS": N_SLOTS,
        **tile_shape(dtype.itemsize, columns, lanes, rule.covers_amax),
    }


def _launch(matrix: torch.Tensor, rule: Rule, columns: bool) -> torch.Tensor:
    """matrix [R, K], unit stride along K; blocks along K, or along R when `columns`."""
    n_rows, n_columns = matrix.shape
    device = matrix.device
    lanes = _lanes(device)
    tile = tile_shape(matrix.element_size(), columns, lanes, rule.covers_amax)
    n_tiles, tiles_across, n_programs, mask = _grid(matrix, tile, device)
    n_blocks = triton.cdiv(n_rows if columns else n_columns, 32)
    shape = (n_blocks, n_columns) if columns else (n_rows, n_blocks)
    amax = torch.empty(shape, dtype=matrix.dtype, device=device)
    part = torch.zeros((n_programs, N_SLOTS), dtype=torch.float64, device=device)
    full_statistics[(n_programs,)](
        matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix,
        amax.view(torch.int32 if matrix.dtype == torch.float32 else torch.int16),
        part,
        n_rows,
        n_columns,
        matrix.stride(0),
        n_blocks,
        n_tiles,
        tiles_across,
        n_programs,
        **kernel_options(rule, matrix.dtype, columns, lanes, mask),
        num_warps=1,
        enable_fp_fusion=True,
    )
    lengths = block_lengths(n_blocks, n_rows if columns else n_columns, 32, device)
    return _finish(part.sum(0), amax, lengths[:, None] if columns else lengths, rule)


def _programs_in_flight(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _finish(s: torch.Tensor, amax: torch.Tensor, lengths: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Slots of `triton_kernels` and the amax of all blocks, NaN or infinite in excluded ones -> float64[N_VALUES]."""
    bits = amax.float().view(torch.int32)
    excluded = bits >= FP32_INF_BITS
    bits = bits.masked_fill(excluded, 0)
    exponent, clamped = scale_exponent(bits, MXFP4, rule)
    real = bits.view(torch.float32).double()
    n = (lengths * ~excluded).sum()
    x2, xe, xr, e2, b2, g2, d2, bg, z2, e = s[:10].unbind()
    bd, b2_saturated, e2_on_d, e2_saturated = s[10:14].unbind()
    n_deadzone, n_zeroed, n_saturated, n_by_scale, n_nonfinite = s[14:CODE_SLOT].unbind()
    if rule.covers_amax:
        # s >= s*: Q = 0 wherever Q* = 0, so that on D both errors are -x, and nothing saturates.
        e2_on_d, n_by_scale = d2 / 36, n_zeroed - n_deadzone
    sums = torch.stack(
        (
            x2,
            e2,
            b2 / 36,
            d2 / 36,
            g2 / 36,
            bg / 36,
            bd / 36,
            x2 + xe,
            x2 + xr / 6,
            e,
            b2_saturated / 36,
            e2_on_d,
            z2,
            e2_saturated,
        )
    )
    n_blocks = torch.full((), bits.numel(), dtype=torch.float64, device=s.device)
    counts = torch.stack(
        (n, n_deadzone, n_zeroed, n_by_scale, n_saturated, clamped.sum(), n_nonfinite, n_blocks, excluded.sum())
    )
    codes = s[CODE_SLOT:].clone()
    codes[0] += n - codes.sum()  # padding of tiles and excluded blocks read as +0
    return pack(sums, counts, real.amax(), delta_histogram(real, power_of_two(exponent), MXFP4), codes)
