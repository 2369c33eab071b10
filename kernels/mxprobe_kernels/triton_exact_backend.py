# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Launching the float64 kernel: formats beside MXFP4, and what the fast kernel flags. Nothing here synchronises."""

from __future__ import annotations

import torch
import triton

from mxprobe_kernels.blocks import block_sizes
from mxprobe_kernels.decomposition import pack
from mxprobe_kernels.formats import E2M1_GRID, Format, Rule
from mxprobe_kernels.rounding import FP32_INF_BITS, tensor_unit
from mxprobe_kernels.torch_backend import delta_histogram, finite_amax
from mxprobe_kernels.triton_exact import (
    EXACT_CODE_SLOT,
    EXACT_SLOTS,
    MAX_EXACT_TILES,
    exact_statistics,
    square_amax,
)
from mxprobe_kernels.triton_formats import constants

TILE_ELEMENTS = 256
"""Eight a lane: a dozen float64 numbers of each fit into registers."""
INTERPRETED_ELEMENTS = 1 << 12
"""Triton's interpreter has no registers to spare, and is quicker with larger tiles."""


def integers(matrix: torch.Tensor) -> torch.Tensor:
    """Return bf16 as the kernels take it, int16 bits; other dtypes as they are."""
    return matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix


def programs(device: torch.device) -> int:
    """Return how many programs are started at most, unless a program would have too much to do."""
    return 2 if device.type == "cpu" else 4096


def tile_rows(format: Format, device: torch.device) -> int:
    """Rows of a tile. Formats that try two scales hold twice as much at a time, and take half as many elements."""
    elements = INTERPRETED_ELEMENTS if device.type == "cpu" else TILE_ELEMENTS // (1 + format.four_over_six)
    return elements // format.block


def options(format: Format, rule: Rule, dtype: torch.dtype, rows: int) -> dict[str, object]:
    """Return the constexpr arguments of `exact_statistics`, but for GROUPED_COLUMNS; tiles of that many rows."""
    return {
        "SQUARE": format.block_rows > 1,
        "CODES": format.grid == E2M1_GRID,
        "BF16": dtype == torch.bfloat16,
        "ROWS": rows,
        "BLOCK": format.block,
        "N_SLOTS": EXACT_SLOTS,
        **constants(format, rule),
    }


def exact_parts(
    rows: torch.Tensor,
    format: Format,
    rule: Rule,
    flag: torch.Tensor | None,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    unit: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    grouped_columns: bool = False,
) -> torch.Tensor:
    """Return float64 [programs, EXACT_SLOTS], or [G, programs, EXACT_SLOTS], of rows [R, K] of any strides.

    Blocks run along K. Zeros where `flag`, int32 [1], holds 0; the other tensors as in `exact_statistics`.
    """
    height = tile_rows(format, rows.device)
    groups = 1 if offsets is None else len(offsets) - 1
    n_tiles = triton.cdiv(rows.shape[0], height) * triton.cdiv(rows.shape[1], format.block)
    n_programs = min(n_tiles, triton.cdiv(programs(rows.device), groups))
    if flag is None or groups == 1:  # codes are counted
        n_programs = max(n_programs, triton.cdiv(n_tiles, MAX_EXACT_TILES))
    part = torch.zeros((groups, n_programs, EXACT_SLOTS), dtype=torch.float64, device=rows.device)
    exact_statistics[(n_programs, groups)](
        integers(rows),
        amax,
        scale,
        part,
        flag,
        unit,
        offsets,
        rows.shape[0],
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        triton.cdiv(rows.shape[1], format.block),
        GROUPED_COLUMNS=grouped_columns,
        **options(format, rule, rows.dtype, height),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return part[0] if offsets is None else part


def decompose_format(rows: torch.Tensor, format: Format, rule: Rule, enabled: torch.Tensor | None) -> torch.Tensor:
    """Return float64 [N_VALUES] of rows [R, K], blocks along K.

    Where `enabled` holds 0 the caller has to zero the result; rows are then not read but for their amax, of a format
    with a scale for the tensor or for squares.
    """
    shape = (triton.cdiv(rows.shape[0], format.block_rows), triton.cdiv(rows.shape[1], format.block))
    device = rows.device
    amax = torch.zeros(shape, dtype=torch.int32, device=device)
    scale = torch.zeros(shape, dtype=torch.float64, device=device)
    if format.block_rows > 1:
        height = tile_rows(format, device)
        square_amax[(triton.cdiv(rows.shape[0], height), shape[1])](
            *(integers(rows), amax, *rows.shape, *rows.stride(), shape[1]),
            BF16=rows.dtype == torch.bfloat16,
            ROWS=height,
            BLOCK=format.block,
            num_warps=1,
        )
    unit = tensor_unit(finite_amax(rows), format) if format.tensor_scale else None
    part = exact_parts(rows, format, rule, enabled, amax=amax, scale=scale, unit=unit).sum(0)
    excluded = amax >= FP32_INF_BITS
    sizes = block_sizes(rows.shape, format, device)
    real = amax.masked_fill(excluded, 0).view(torch.float32).double()
    n = (sizes * ~excluded).sum()
    n_deadzone, n_zeroed, n_by_scale, n_saturated, n_clamped, n_nonfinite = part[14:EXACT_CODE_SLOT].unbind()
    n_blocks = torch.full((), amax.numel(), dtype=torch.int64, device=device)
    counts = torch.stack(
        [
            count.double()
            for count in (
                *(n, n_deadzone, n_zeroed, n_by_scale, n_saturated, n_clamped),
                *(n_nonfinite, n_blocks, excluded.sum()),
            )
        ]
    )
    codes = part[EXACT_CODE_SLOT:].clone()
    if format.grid == E2M1_GRID:
        codes[0] += n - codes.sum()  # padding and excluded blocks read as +0
    return pack(part[:14], counts, real.amax(), delta_histogram(real, scale, format), codes)
