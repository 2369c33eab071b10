"""`nn.Linear` whose weight is a DTensor: torch's ColwiseParallel and RowwiseParallel, FSDP2, and both together.

    plan         weight      x            G
    colwise      Shard(0)    replicated   sharded by out
    rowwise      Shard(1)    by in        replicated

The hook goes before those that `parallelize_module` put there: these all-reduce or reduce-scatter the output, and
before them it is the rank's own product, x_i W_i^T, exactly. The module's own input is redistributed by a pre-hook, so
that x is past the all-gather of sequence parallelism. Between steps FSDP2 holds a shard of W along another mesh than
the one it computes with: such weights are read in a forward pass only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import Reading, Unread, first_argument, held, unreadable
from mxprobe.measuring.adapters.placement import Placement, Shard
from mxprobe.measuring.adapters.torch_linear import LinearAdapter
from mxprobe.measuring.isolation import is_plain

OUT_FEATURES, IN_FEATURES = 0, 1
"""Dimensions of W."""


class TensorParallelAdapter(LinearAdapter):
    family = "torch.distributed.tensor"
    prepend = True

    def recognises(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and is_dtensor(held(module, "weight"))

    def read(
        self, module: nn.Module, part: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Reading | Unread:
        given = first_argument(args, kwargs, "input")
        weight = held(module, "weight")
        x, y, w = local(given), local(output), local(weight)
        if x is None or y is None or w is None:
            return unreadable(given, output)
        if not is_dtensor(weight):
            return Reading(x, output, y)
        mesh = weight.device_mesh
        if mesh.ndim != 1:
            return f"its weight is spread over a mesh of {mesh.ndim} dimensions"
        shard = Shard(int(mesh.get_local_rank()), int(mesh.size()))
        dim = _shard_dim(weight)
        placement = Placement(
            token_group=f"r{int(mesh.mesh.min())}",
            out_features=shard if dim == OUT_FEATURES else Shard(),
            in_features=shard if dim == IN_FEATURES else Shard(),
        )
        return Reading(x, output, y, placement=placement, weight=w)

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        """Return the rank's bias. A row-parallel one is added on one rank only, and the y of that rank contains it."""
        bias = held(module, "bias")
        return local(bias) if bias is not None else None

    def gradient(self, gradient: Any, reading: Reading) -> torch.Tensor | None:
        if is_dtensor(gradient) and any(each.is_partial() for each in gradient.placements):
            return None
        return local(gradient)


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" and isinstance(tensor, torch.Tensor)


def local(tensor: Any) -> torch.Tensor | None:
    """Return the rank's own part of a DTensor, a plain tensor itself; None for anything else."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.trigger_wait()  # the module has waited for it already
    return tensor if is_plain(tensor) else None


def _shard_dim(tensor: Any) -> int | None:
    (placement,) = tensor.placements
    return placement.dim if placement.is_shard() else None
