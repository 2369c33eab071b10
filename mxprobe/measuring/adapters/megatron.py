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

from mxprobe.measuring.adapters.adapter import (
    Adapter,
    Reading,
    Rows,
    Signature,
    Unread,
    held,
    input_and_output,
)
from mxprobe.measuring.adapters.placement import Placement, Shard

VERSION = "megatron-core 0.16.1"
SUMMED = "y is the sum over tensor-parallel ranks: the own product of the layer is not visible"


class _MegatronAdapter(Adapter):
    def weight(self, module: nn.Module, part: str) -> Any:
        return held(module, "weight")

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        return None if held(module, "skip_bias_add") else held(module, "bias")

    def shard(self, module: nn.Module) -> tuple[Shard, str]:
        """(place among the tensor-parallel ranks, token group)."""
        return shard_of(held(module, "tp_group"))


class ColumnParallelAdapter(_MegatronAdapter):
    family = "Megatron ColumnParallelLinear"
    signatures = (
        Signature(
            "megatron",
            "ColumnParallelLinear",
            VERSION,
            ("input_", "weight", "runtime_gather_output"),
            *(("input_size", "output_size_per_partition", "gather_output", "skip_bias_add", "sequence_parallel"),),
        ),
    )

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        return held(module, "output_size_per_partition"), held(module, "input_size")

    def read(
        self, module: nn.Module, part: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Reading | Unread:
        both = input_and_output(args, kwargs, "input_", output)
        if isinstance(both, str):
            return both
        x, y = both
        shard, group = self.shard(module)
        n_out = held(module, "output_size_per_partition")
        columns = (shard.index * n_out, n_out) if y.shape[-1] > n_out else None
        tokens = shard if is_part(x, y, shard) else Shard()
        own = y.detach().reshape(-1, y.shape[-1])
        if columns is not None:
            own = own.narrow(1, *columns)
        if tokens.count > 1:
            n = rows_of(x)
            own = own.narrow(0, shard.index * n, n)
        given = args[1] if len(args) > 1 else kwargs.get("weight")
        return Reading(
            x,
            y,
            own,
            placement=Placement(group, out_features=shard, x_tokens=tokens),
            columns=columns,
            weight=given,
        )


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

    def read(
        self, module: nn.Module, part: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Reading | Unread:
        both = input_and_output(args, kwargs, "input_", output)
        if isinstance(both, str):
            return both
        x, y = both
        shard, group = self.shard(module)
        n_in = held(module, "input_size_per_partition")
        g_tokens = shard if is_part(y, x, shard) else Shard()
        return Reading(
            x,
            y,
            y if shard.count == 1 else None,
            "" if shard.count == 1 else SUMMED,
            Placement(group, in_features=shard, g_tokens=g_tokens),
            own_columns(shard.index * n_in, n_in) if x.shape[-1] > n_in else None,
        )


def shard_of(group: Any) -> tuple[Shard, str]:
    """(place in a process group, `r` and its lowest rank); the whole, of no group, where there is none."""
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Shard(), ""
    size = int(group.size())
    if size <= 1:
        return Shard(), ""
    ranks = torch.distributed.get_process_group_ranks(group)
    return Shard(int(group.rank()), size), f"r{min(ranks)}"


def rows_of(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def is_part(part: torch.Tensor, whole: torch.Tensor, shard: Shard) -> bool:
    """Whether one tensor has the tokens of one rank and the other those of all."""
    return shard.count > 1 and rows_of(part) * shard.count == rows_of(whole)


def own_columns(first: int, n: int) -> Rows:
    """Rows of x -> their columns that are this rank's."""
    return lambda x: x.narrow(-1, first, n)
