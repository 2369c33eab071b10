"""The decomposition by groups of rows in plain torch: rows, or blocks of tokens, are summed into their group. Shipped.

No shape depends on the offsets, so that nothing is read from the device: along tokens, T // B + E blocks of rows hold
any split of T rows among E groups, and those that are left over are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxprobe_kernels.blocks import block_lengths, pad_rows, rows_of
from mxprobe_kernels.columns import DELTA_BINS
from mxprobe_kernels.decomposition import AMAX_INDEX
from mxprobe_kernels.decomposition import N_VALUES as N_VALUES
from mxprobe_kernels.formats import E2M1_GRID, Format, Rule
from mxprobe_kernels.torch_backend import (
    CPU_TILE_ELEMENTS,
    DEVICE_TILE_ELEMENTS,
    ErrorFields,
    delta_bins,
    energies,
    fields_of,
    flags,
)


class _Rows(NamedTuple):
    """float32 blocks [R, N, B], the group of each R (E for none), and elements of each block, int64 [R, N or 1]."""

    blocks: torch.Tensor
    group: torch.Tensor
    sizes: torch.Tensor


def decompose(x: torch.Tensor, offsets: torch.Tensor, format: Format, rule: Rule, along_tokens: bool) -> torch.Tensor:
    """Return the values of each expert, float64 [E, N_VALUES], of x [T, K] cut at offsets [E + 1]."""
    rows = rows_of(x, -1)
    n_groups = len(offsets) - 1
    total = torch.zeros((n_groups + 1, N_VALUES), dtype=torch.float64, device=x.device)
    if not rows.numel() or not n_groups:
        return total[:n_groups]
    offsets = offsets.to(torch.int64)
    amax = _group_amax(rows, offsets) if format.tensor_scale else None
    limit = CPU_TILE_ELEMENTS if x.device.type == "cpu" else DEVICE_TILE_ELEMENTS
    peak = torch.zeros(n_groups + 1, dtype=torch.float64, device=x.device)
    step = max(limit // rows.shape[1] // (format.block if along_tokens else 1), 1)
    n_rows = len(rows) // format.block + n_groups if along_tokens else len(rows)
    for begin in range(0, n_rows, step):
        cut = _token_blocks if along_tokens else _row_blocks
        part = cut(rows, offsets, format.block, begin, min(begin + step, n_rows))
        tensor_amax = None if amax is None else amax[part.group][:, None, None]
        f = fields_of(part.blocks, part.sizes, format, rule, tensor_amax)
        total.index_add_(0, part.group, _row_values(f, part))
        total += _histograms(f, part, n_groups)
        peak.scatter_reduce_(0, part.group, f.scales.amax.amax((1, 2)), "amax")
    total[:, AMAX_INDEX] = peak
    return total[:n_groups]


_DELTA = AMAX_INDEX + 1


def group_of(index: torch.Tensor, starts: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Return of each index [n] the last group that starts at or before it; the number of groups where it is in none."""
    group = torch.searchsorted(starts, index, right=True) - 1
    return torch.where((group < 0) | (index >= end), len(starts), group)


def _group_amax(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """float32 [E + 1]: max|x| of each group's finite elements."""
    group = group_of(torch.arange(len(rows), device=rows.device), offsets[:-1], offsets[-1])
    largest = rows.float().abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    return largest.new_zeros(len(offsets)).scatter_reduce_(0, group, largest, "amax")


def _row_blocks(rows: torch.Tensor, offsets: torch.Tensor, block: int, begin: int, end: int) -> _Rows:
    blocks = pad_rows(rows[begin:end], block)
    group = group_of(torch.arange(begin, end, device=rows.device), offsets[:-1], offsets[-1])
    return _Rows(
        blocks, group, block_lengths(blocks.shape[1], rows.shape[1], block, rows.device).expand(len(group), -1)
    )


def _token_blocks(rows: torch.Tensor, offsets: torch.Tensor, block: int, begin: int, end: int) -> _Rows:
    """Block j of all is `block` tokens of one group by all features: [j, K, block]."""
    counts = (offsets[1:] - offsets[:-1] + block - 1) // block
    ends = counts.cumsum(0)
    j = torch.arange(begin, end, device=rows.device)
    group = group_of(j, ends - counts, ends[-1])
    known = group.clamp(max=len(counts) - 1)
    first = offsets[known] + (j - (ends - counts)[known]) * block
    token = first[:, None] + torch.arange(block, device=rows.device)
    there = (token < offsets[known + 1][:, None]) & (group < len(counts))[:, None]
    taken = rows.float()[token.clamp(0, len(rows) - 1)].masked_fill_(~there[:, :, None], 0.0)
    return _Rows(taken.transpose(1, 2).contiguous(), group, there.sum(1, keepdim=True).expand(-1, rows.shape[1]))


def _row_values(f: ErrorFields, part: _Rows) -> torch.Tensor:
    """float64 [R, N_VALUES]: sums and counts of each R; amax and histograms 0."""
    excluded = f.scales.excluded.squeeze(-1)
    exists = part.sizes > 0
    n_dead, n_zeroed, n_by_scale, n_saturated = (flag.sum((1, 2)) for flag in flags(f))
    counts = (
        (part.sizes * ~excluded).sum(1),
        *(n_dead, n_zeroed, n_by_scale, n_saturated),
        f.scales.clamped.sum((1, 2)),
        (~torch.isfinite(part.blocks)).sum((1, 2)),
        exists.sum(1),
        (excluded & exists).sum(1),
    )
    values = [energy.sum((1, 2)) for energy in energies(f)] + [count.double() for count in counts]
    rest = values[0].new_zeros((len(values[0]), N_VALUES - len(values)))
    return torch.cat((torch.stack(values, 1), rest), 1)


def _histograms(f: ErrorFields, part: _Rows, n_groups: int) -> torch.Tensor:
    """float64 [E + 1, N_VALUES]: both histograms, zeros elsewhere."""
    group = part.group
    total = torch.zeros((n_groups + 1, N_VALUES), dtype=torch.float64, device=group.device)
    real = f.scales.amax.squeeze(-1) > 0
    bins = delta_bins(f.scales.amax, f.scales.scale, f.format).squeeze(-1)
    _add_at(total, group[:, None] * N_VALUES + _DELTA + bins, real)
    if f.format.grid == E2M1_GRID:
        inside = torch.arange(f.code.shape[-1], device=group.device) < part.sizes[..., None]
        _add_at(
            total,
            group[:, None, None] * N_VALUES + _DELTA + DELTA_BINS + f.code,
            inside & ~f.scales.excluded,
        )
    return total


def _add_at(total: torch.Tensor, index: torch.Tensor, counted: torch.Tensor) -> None:
    total.view(-1).scatter_add_(0, index.reshape(-1), counted.expand(index.shape).reshape(-1).double())
