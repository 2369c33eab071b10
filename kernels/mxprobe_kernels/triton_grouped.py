# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""The Triton statistics of experts in one launch: program (p, e) takes tiles of expert e, found by the offsets.

Nothing is read from the device: the grid and the amax of blocks have room for any split of T tokens among E experts.
"""

from __future__ import annotations

import torch
import triton

from mxprobe_kernels.decomposition import N_VALUES
from mxprobe_kernels.formats import MXFP4, Rule
from mxprobe_kernels.rounding import FP32_INF_BITS, power_of_two, scale_exponent
from mxprobe_kernels.torch_backend import delta_bins
from mxprobe_kernels.torch_grouped import group_of
from mxprobe_kernels.triton_backend import (
    BlockStatistics,
    finish,
    lanes_of,
    launch_full,
    new_amax,
    programs_in_flight,
    tile_shape,
    zeroed_parts,
)
from mxprobe_kernels.triton_exact_backend import exact_parts
from mxprobe_kernels.triton_kernels import N_SLOTS

MAX_TILES_PER_PROGRAM = 256
"""Limit if all tokens were one expert's. Usually a program has a small part of that."""


def decompose(x: torch.Tensor, offsets: torch.Tensor, rule: Rule, along_tokens: bool) -> torch.Tensor:
    """Return float64 [E, N_VALUES] of x [T, K] cut at offsets [E + 1]; blocks along K or down an expert's tokens."""
    n_groups, device = len(offsets) - 1, x.device
    if not x.numel() or not n_groups:
        return torch.zeros((n_groups, N_VALUES), dtype=torch.float64, device=device)
    matrix = x.float() if x.dtype == torch.float64 else x
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    tile = tile_shape(matrix.element_size(), along_tokens, lanes_of(device), rule.covers_amax)
    tiles_across = triton.cdiv(matrix.shape[1], tile["CC"] * tile["V"])
    n_tiles = triton.cdiv(matrix.shape[0], tile["RR"] * tile["RL"]) * tiles_across
    in_flight = triton.cdiv(programs_in_flight(device), n_groups)
    n_programs = min(n_tiles, max(in_flight, triton.cdiv(n_tiles, MAX_TILES_PER_PROGRAM)))
    n_blocks = triton.cdiv(matrix.shape[1], 32)
    shape = (len(x) // 32 + n_groups, matrix.shape[1]) if along_tokens else (len(x), n_blocks)
    amax = new_amax(shape, matrix, zeros=True)
    part, flag = zeroed_parts(n_groups * n_programs, N_SLOTS, device)
    launch_full(
        *((n_programs, n_groups), matrix, amax, part, flag, None, offsets, n_blocks, tiles_across, rule, along_tokens),
        mask=True,
    )
    exact = exact_parts(
        *(matrix.t() if along_tokens else matrix, MXFP4, rule, flag), offsets=offsets, grouped_columns=along_tokens
    )
    fast = part.view(n_groups, n_programs, N_SLOTS).sum(1)
    return finish(fast, exact.sum(1), flag, _blocks(amax, offsets.to(torch.int64), matrix, rule, along_tokens), rule)


def _blocks(
    amax: torch.Tensor, offsets: torch.Tensor, matrix: torch.Tensor, rule: Rule, along_tokens: bool
) -> BlockStatistics:
    """Return the block statistics of each expert, from the amax of all blocks."""
    n_groups = len(offsets) - 1
    index = torch.arange(len(amax), device=amax.device)
    if along_tokens:  # expert e's first block is row offsets[e] // 32 + e
        starts = offsets[:-1] // 32 + torch.arange(n_groups, device=amax.device)
        group = group_of(index, starts, torch.full_like(offsets[-1], len(amax)))
        known = group.clamp(max=n_groups - 1)
        left = (offsets[1:] - offsets[:-1])[known] - 32 * (index - starts[known])
        lengths = left.clamp(0, 32).masked_fill(group == n_groups, 0)[:, None].expand_as(amax)
    else:
        group = group_of(index, offsets[:-1], offsets[-1])
        lengths = (matrix.shape[1] - 32 * torch.arange(amax.shape[1], device=amax.device)).clamp(max=32)
        lengths = lengths.expand_as(amax)
    bits = amax.float().view(torch.int32)
    excluded = bits >= FP32_INF_BITS
    bits = bits.masked_fill(excluded, 0)
    exponent, clamped = scale_exponent(bits, MXFP4, rule)
    real = bits.view(torch.float32).double()

    def by_group(values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(n_groups + 1, dtype=torch.float64, device=amax.device)
        return total.index_add_(0, group, values.double().sum(1))[:n_groups]

    peak = torch.zeros(n_groups + 1, dtype=torch.float64, device=amax.device)
    delta = torch.zeros((n_groups + 1) * 32, dtype=torch.float64, device=amax.device)
    bins = delta_bins(real, power_of_two(exponent), MXFP4) + 32 * group[:, None]
    delta.scatter_add_(0, bins.reshape(-1), (real > 0).reshape(-1).double())
    return BlockStatistics(
        n=by_group(lengths * ~excluded),
        clamped=by_group(clamped),
        n_blocks=by_group(lengths > 0),
        excluded=by_group(excluded & (lengths > 0)),
        amax=peak.scatter_reduce_(0, group, real.amax(1), "amax")[:n_groups],
        delta=delta.view(-1, 32)[:n_groups],
    )
