# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Launching the Triton kernels, and finishing their sums. Nothing here synchronises or copies to the host.

The fast kernels leave per-program partial sums in float64, the amax of every block, and a flag. Where the flag is up
(NaN, infinity, or sums that fp32 may have lost) a second launch does the tensor again in float64; else its programs
end at once. What belongs to a block (scale exponent, clamps, delta histogram, number of elements counted) is 1/32 of
the data and is finished in torch.

All of it may be captured into a CUDA graph: nothing is tuned, no shape is read from the device, and `enabled`, an int32
on the device, switches a captured launch off and on. Run once before the capture, with tensors of the same dtypes and
shapes (`warm_up` in `custom_op`): compiling is not captured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from mxprobe_kernels.blocks import block_lengths, rows_of, unit_stride
from mxprobe_kernels.decomposition import Decomposition, empty
from mxprobe_kernels.formats import MXFP4, Format, Rule
from mxprobe_kernels.lite_statistics import Lite
from mxprobe_kernels.rounding import FP32_INF_BITS, power_of_two, scale_exponent
from mxprobe_kernels.torch_backend import delta_histogram
from mxprobe_kernels.triton_exact_backend import decompose_format, exact_parts, integers
from mxprobe_kernels.triton_kernels import CODE_SLOT, MAX_TILES_PER_PROGRAM, N_SLOTS, full_statistics
from mxprobe_kernels.triton_lite import LITE_SLOTS, lite_statistics

PROGRAMS_PER_PROCESSOR = 24
"""Warps in flight that hide the latency of loads at about 80 registers a lane."""

JOINS_HALVES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""Whether the compiler keeps two loads of one fp32 block in a lane; older ones pass them through shared memory."""

INTERPRETED = 0
"""In place of the lanes of a warp: Triton's interpreter has none, and fewer, larger tiles are quicker there."""


@torch.no_grad()
def decompose(
    x: torch.Tensor, format: Format, rule: Rule, dim: int, *, enabled: torch.Tensor | None = None
) -> Decomposition:
    """Decompose x as `torch_backend.decompose` does; sums within 1e-6 of float64, codes, counts, histograms exact.

    `enabled`: int32 [1] on the device of x; where it holds 0 everything is 0, and x is not read but for its amax, of a
    format with a scale for the tensor or for squares.
    """
    rows = rows_of(x, dim)
    if not rows.numel():
        return Decomposition(empty(x.device), format.name, rule.value)
    if rows.dtype == torch.float64:
        rows = rows.float()
    if format == MXFP4:
        matrix, columns = unit_stride(rows)
        values = _launch(matrix, rule, columns, enabled)
    else:
        values = decompose_format(rows, format, rule, enabled)
    if enabled is not None:
        values = torch.where(enabled != 0, values, 0.0)
    return Decomposition(values, format.name, rule.value)


@torch.no_grad()
def lite(x: torch.Tensor, rule: Rule, *, enabled: torch.Tensor | None = None) -> Lite:
    """Return the always-on statistics of x [..., K], blocks of 32 along the last axis, which must have unit stride.

    A quarter to a third of the instructions of `decompose`. ValueError for a tensor whose last axis is strided: a
    copy would cost more than the statistics. `enabled` as there.
    """
    rows = rows_of(x, -1)
    if rows.dtype == torch.float64 or (rows.numel() and rows.stride(1) != 1):
        raise ValueError("lite statistics take float32, bfloat16 or float16 with a unit-stride last axis")
    device = x.device
    if not rows.numel():
        return Lite(torch.zeros(5, dtype=torch.float64, device=device), torch.zeros((), device=device))
    tile = lite_tile_shape(rows.element_size(), lanes_of(device))
    n_tiles, tiles_across, n_programs, mask = _grid(rows, tile, device)
    amax = torch.empty(n_programs, dtype=torch.int32, device=device)
    part, flag = zeroed_parts(n_programs, LITE_SLOTS, device)
    lite_statistics[(n_programs,)](
        integers(rows),
        amax,
        part,
        flag,
        enabled,
        rows.shape[0],
        rows.shape[1],
        rows.stride(0),
        n_tiles,
        tiles_across,
        **lite_options(rule, rows.dtype, lanes_of(device), mask),
        num_warps=1,
        enable_fp_fusion=True,
    )
    fast = part.sum(0)
    exact = exact_parts(rows, MXFP4, rule, flag).sum(0)
    # sum_x2, sum_e2, n_zeroed, n_saturated; n_nonfinite is only ever counted there
    chosen = torch.cat((exact[:2], exact[15:16], exact[17:18]))  # an index of the host would be copied, and waited for
    both = torch.where(flag != 0, chosen, fast)
    return Lite(torch.cat((both, exact[19:20])), amax.amax().view(torch.float32))


def zeroed_parts(n: int, slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeros of one allocation: parts, float64 [n, slots], and the flag, int32 [1]."""
    buffer = torch.zeros(n * slots + 1, dtype=torch.float64, device=device)
    return buffer[:-1].view(n, slots), buffer[-1:].view(torch.int32)[:1]


def lanes_of(device: torch.device) -> int:
    return INTERPRETED if device.type == "cpu" else 64 if torch.version.hip else 32


def _grid(matrix: torch.Tensor, tile: dict[str, int], device: torch.device) -> tuple[int, int, int, bool]:
    """Tiles in all, tiles across, programs, and whether tiles stick out."""
    rows, columns = tile["RR"] * tile["RL"], tile["CC"] * tile["V"]
    tiles_across = triton.cdiv(matrix.shape[1], columns)
    n_tiles = triton.cdiv(matrix.shape[0], rows) * tiles_across
    n_programs = min(n_tiles, max(programs_in_flight(device), triton.cdiv(n_tiles, MAX_TILES_PER_PROGRAM)))
    return n_tiles, tiles_across, n_programs, bool(matrix.shape[0] % rows or matrix.shape[1] % columns)


def tile_shape(element_bytes: int, columns: bool, lanes: int, covers: bool) -> dict[str, int]:
    """Return RR, RL, CC, V of a tile: one warp, 128-bit loads, as many elements a lane as no target spills at.

    Column blocks take the 32 rows of a tile: there RR * RL = 32. Row blocks have eight elements in a lane, those of
    fp32 by two loads (`JOINS_HALVES`), so that four lanes share what is computed once a block.
    """
    if element_bytes == 4 and not columns and JOINS_HALVES:
        if lanes == INTERPRETED:
            return {"RR": 8, "RL": 8, "CC": 4, "V": 8}
        return {"RR": 1 if lanes == 64 else 2, "RL": lanes // 4, "CC": 4, "V": 8}
    vector = 16 // element_bytes
    if lanes == INTERPRETED:
        return {"RR": 8, "RL": 4, "CC": 8, "V": vector}
    # AMD keeps one bit a lane of every comparison in scalar registers, and has few; rules that can saturate
    # carry four more sums.
    elements = 8 if lanes == 64 or (columns and not covers) else 16
    rows_in_registers = max(elements // vector, 1)
    row_lanes = 32 // rows_in_registers if columns else lanes // 8
    return {"RR": rows_in_registers, "RL": row_lanes, "CC": lanes // row_lanes, "V": vector}


def lite_tile_shape(element_bytes: int, lanes: int) -> dict[str, int]:
    """Return row tiles of the lite kernel, whose few sums leave NVIDIA's registers room for twice the rows."""
    vector = 16 // element_bytes
    if lanes == INTERPRETED:
        return {"RR": 8, "RL": 4, "CC": 8, "V": vector}
    return {"RR": (8 if lanes == 64 else 32) // vector, "RL": lanes // 8, "CC": 8, "V": vector}


def kernel_options(rule: Rule, dtype: torch.dtype, columns: bool, lanes: int, mask: bool) -> dict[str, object]:
    """Return the constexpr arguments of `full_statistics`."""
    return {
        "BIAS": MXFP4.amax_bias(rule),
        "COVERS": rule.covers_amax,
        "COLUMNS": columns,
        "MASK": mask,
        "BF16": dtype == torch.bfloat16,
        "EXACT": dtype == torch.float32,
        "LANES_OF_WARP": lanes,
        "N_SLOTS": N_SLOTS,
        **tile_shape(dtype.itemsize, columns, lanes, rule.covers_amax),
    }


def lite_options(rule: Rule, dtype: torch.dtype, lanes: int, mask: bool) -> dict[str, object]:
    """Return the constexpr arguments of `lite_statistics`."""
    return {
        "BIAS": MXFP4.amax_bias(rule),
        "COVERS": rule.covers_amax,
        "MASK": mask,
        "BF16": dtype == torch.bfloat16,
        "N_SLOTS": LITE_SLOTS,
        **lite_tile_shape(dtype.itemsize, lanes),
    }


def _launch(matrix: torch.Tensor, rule: Rule, columns: bool, enabled: torch.Tensor | None) -> torch.Tensor:
    """matrix [R, K], unit stride along K; blocks along K, or along R when `columns` -> float64 [N_VALUES]."""
    n_rows, n_columns = matrix.shape
    device = matrix.device
    tile = tile_shape(matrix.element_size(), columns, lanes_of(device), rule.covers_amax)
    _, tiles_across, n_programs, mask = _grid(matrix, tile, device)
    n_blocks = triton.cdiv(n_rows if columns else n_columns, 32)
    amax = new_amax((n_blocks, n_columns) if columns else (n_rows, n_blocks), matrix, zeros=enabled is not None)
    part, flag = zeroed_parts(n_programs, N_SLOTS, device)
    launch_full((n_programs, 1), matrix, amax, part, flag, enabled, None, n_blocks, tiles_across, rule, columns, mask)
    exact = exact_parts(matrix.t() if columns else matrix, MXFP4, rule, flag).sum(0)
    lengths = block_lengths(n_blocks, n_rows if columns else n_columns, 32, device)
    per_block = lengths[:, None] if columns else lengths
    scales = block_statistics(amax, per_block.expand_as(amax).reshape(1, -1), rule)
    return finish(part.sum(0)[None], exact[None], flag, scales, rule)[0]


def new_amax(shape: tuple[int, int], matrix: torch.Tensor, zeros: bool) -> torch.Tensor:
    make = torch.zeros if zeros else torch.empty
    return make(shape, dtype=matrix.dtype, device=matrix.device)


def launch_full(
    grid: tuple[int, int],
    matrix: torch.Tensor,
    amax: torch.Tensor,
    part: torch.Tensor,
    flag: torch.Tensor,
    enabled: torch.Tensor | None,
    offsets: torch.Tensor | None,
    n_blocks: int,
    tiles_across: int,
    rule: Rule,
    columns: bool,
    mask: bool,
) -> None:
    full_statistics[grid](
        integers(matrix),
        amax.view(torch.int32 if matrix.dtype == torch.float32 else torch.int16),
        part,
        flag,
        enabled,
        offsets,
        matrix.shape[0],
        matrix.shape[1],
        matrix.stride(0),
        n_blocks,
        tiles_across,
        **kernel_options(rule, matrix.dtype, columns, lanes_of(matrix.device), mask),
        **launch_options(lanes_of(matrix.device)),
    )


def launch_options(lanes: int) -> dict[str, int]:
    """Return one warp and its registers: ptxas alone holds column blocks to 168 on sm_100 and sm_120, and spills."""
    return {"num_warps": 1, "enable_fp_fusion": True, **({"maxnreg": 255} if lanes == 32 else {})}


class BlockStatistics(NamedTuple):
    """What belongs to blocks, float64 [G] and [G, DELTA_BINS], by group."""

    n: torch.Tensor
    clamped: torch.Tensor
    n_blocks: torch.Tensor
    excluded: torch.Tensor
    amax: torch.Tensor
    delta: torch.Tensor


def block_statistics(amax: torch.Tensor, lengths: torch.Tensor, rule: Rule) -> BlockStatistics:
    """Return the statistics of one group from amax of all blocks (excluded: NaN or infinite), lengths [1, blocks]."""
    bits = amax.reshape(-1).float().view(torch.int32)
    excluded = bits >= FP32_INF_BITS
    bits = bits.masked_fill(excluded, 0)
    exponent, clamped = scale_exponent(bits, MXFP4, rule)
    real = bits.view(torch.float32).double()
    n_blocks = torch.full((1,), float(bits.numel()), dtype=torch.float64, device=amax.device)
    n = (lengths * ~excluded).sum(1).double()
    delta = delta_histogram(real, power_of_two(exponent), MXFP4)[None]
    return BlockStatistics(n, clamped.sum()[None], n_blocks, excluded.sum()[None], real.amax()[None], delta)


def finish(
    fast: torch.Tensor, exact: torch.Tensor, flag: torch.Tensor, blocks: BlockStatistics, rule: Rule
) -> torch.Tensor:
    """Return float64 [G, N_VALUES] from slots of `triton_kernels` [G, N_SLOTS] and `triton_exact` [G, EXACT_SLOTS]."""
    x2, xe, xr, e2, b2, g2, d2, bg, z2, e = fast[:, :10].unbind(1)
    bd, b2_saturated, e2_on_d, e2_saturated = fast[:, 10:14].unbind(1)
    n_deadzone, nulls, n_saturated, n_by_scale = fast[:, 14:CODE_SLOT].unbind(1)
    codes = fast[:, CODE_SLOT:].clone()
    n_zeroed = codes[:, 0] + codes[:, 8] - nulls
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
        ),
        1,
    )
    sums = torch.where(flag != 0, exact[:, :14], sums)
    counts = (
        *(blocks.n, n_deadzone, n_zeroed, n_by_scale, n_saturated, blocks.clamped),
        *(exact[:, 19], blocks.n_blocks, blocks.excluded),  # n_nonfinite: 0 where the flag is down
    )
    codes[:, 0] += blocks.n - codes.sum(1)  # padding of tiles and excluded blocks read as +0
    counted = torch.stack([count.double() for count in counts], 1)
    return torch.cat((sums, counted, blocks.amax[:, None], blocks.delta.double(), codes), 1)


def programs_in_flight(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
