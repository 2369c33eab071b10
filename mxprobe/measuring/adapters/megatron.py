"""Megatron-Core's `ColumnParallelLinear` and `RowParallelLinear`: (output, bias) from x, one shard of W a rank.

    layer    parallel in   x at the hook                 y at the hook
    column   out           whole; with sequence          own columns; with `gather_output` all of them
                           parallelism own tokens
    row      in            own columns, or all           all-reduced; with sequence parallelism
                           (`input_is_parallel` False)   own tokens of the sum

Tokens are gathered and scattered along the first dimension in rank order, so own rows are a run of all rows. The own
product of a column-parallel layer is visible; that of a row-parallel one is summed inside, and y is withheld.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import Adapter, Reading, Signature, Unread, first_of, held
from mxprobe.measuring.adapters.placement import Placement, Shard

VERSION = "megatron-core 0.16.1"
SUMMED = "y is the sum over tensor-parallel ranks: the own product of the layer is not visible"


class _MegatronAdapter(Adapter):
    argument = "input_"

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        return None if held(module, "skip_bias_add") else held(module, "bias")

    def output_of(self, module: nn.Module, output: Any) -> Any:
        return first_of(output)


class ColumnParallelAdapter(_MegatronAdapter):
    family = "Megatron ColumnParallelLinear"
    signatures = (
        Signature(
            "megatron",
            "ColumnParallelLinear",
            VERSION,
            ("input_", "weight", "runtime_gather_output"),
            ("input_size", "output_size_per_partition", "gather_output", "skip_bias_add", "sequence_parallel"),
        ),
    )

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        return held(module, "output_size_per_partition"), held(module, "input_size")

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        shard, group = shard_of(held(module, "tp_group"))
        n_out = held(module, "output_size_per_partition")
        columns = (shard.index * n_out, n_out) if y.shape[-1] > n_out else None
        tokens = shard if is_part(x, y, shard) else Shard()
        own = own_rows(y, x, tokens)
        if columns is not None:
            own = own.narrow(1, *columns)
        given = args[1] if len(args) > 1 else kwargs.get("weight")
        placement = Placement(group, out_features=shard, x_tokens=tokens)
        return Reading(x, y, own, placement=placement, columns=columns, weight=given)


class RowParallelAdapter(_MegatronAdapter):
    family = "Megatron RowParallelLinear"
    signatures = (
        Signature(
            "megatron",
            "RowParallelLinear",
            VERSION,
            ("input_",),
            ("input_size_per_partition", "output_size", "input_is_parallel", "skip_bias_add", "sequence_parallel"),
        ),
    )

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        return held(module, "output_size"), held(module, "input_size_per_partition")

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        shard, group = shard_of(held(module, "tp_group"))
        n_in = held(module, "input_size_per_partition")
        columns = (lambda rows: rows.narrow(-1, shard.index * n_in, n_in)) if x.shape[-1] > n_in else None
        return row_parallel(x, y, shard, group)._replace(operand=columns)


def row_parallel(x: torch.Tensor, y: torch.Tensor, shard: Shard, group: str) -> Reading:
    """Return what a layer shows whose weight is split along its in-features: y is the sum over ranks."""
    tokens = shard if is_part(y, x, shard) else Shard()
    placement = Placement(group, in_features=shard, g_tokens=tokens)
    if shard.count > 1:
        return Reading(x, y, None, SUMMED, placement)
    return Reading(x, y, y, placement=placement)


def shard_of(group: Any) -> tuple[Shard, str]:
    """Return the place in a process group, and `r` with its lowest rank; the whole, of no group, without one."""
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Shard(), ""
    size = int(group.size())
    if size <= 1:
        return Shard(), ""
    ranks = torch.distributed.get_process_group_ranks(group)
    return Shard(int(group.rank()), size), f"r{min(ranks)}"


def is_part(part: torch.Tensor, whole: torch.Tensor, shard: Shard) -> bool:
    """Say whether one tensor has the tokens of one rank and the other those of all."""
    return shard.count > 1 and _n_rows(part) * shard.count == _n_rows(whole)


def own_rows(y: torch.Tensor, x: torch.Tensor, tokens: Shard) -> torch.Tensor:
    """Return the rows [R_x, O] of y that belong to the rows of x, where x has this shard of the tokens of y."""
    rows = y.detach().reshape(-1, y.shape[-1])
    return rows.narrow(0, tokens.index * _n_rows(x), _n_rows(x)) if tokens.count > 1 else rows


def _n_rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]
