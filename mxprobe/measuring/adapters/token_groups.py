"""Which ranks compute on the same tokens: told from the model, without a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import held
from mxprobe.measuring.adapters.megatron import shard_of
from mxprobe.measuring.adapters.tensor_parallel import is_dtensor


def token_group(roots: Sequence[nn.Module]) -> str:
    """Return `r` and the lowest rank of those that share the tokens of a replicated module; "" without ranks.

    That is the model's tensor-parallel group; this rank alone where there is none, or where sequence parallelism
    gives every rank of it tokens of its own. Called between steps, when FSDP2 holds weights along its own mesh.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    own = f"r{torch.distributed.get_rank()}"
    modules = [module for root in roots for module in root.modules()]
    if any(held(module, "sequence_parallel", False) is True for module in modules):
        return own
    sharded = any(_is_fsdp(module) for module in modules)
    groups = {shard_of(held(module, "tp_group"))[1] for module in modules}
    groups |= {_tensor_parallel(held(module, "weight"), sharded) for module in modules}
    groups.discard("")
    return groups.pop() if len(groups) == 1 else own


def _is_fsdp(module: nn.Module) -> bool:
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def _tensor_parallel(weight: Any, sharded: bool) -> str:
    """Return the group of a DTensor's mesh; of its last dimension where FSDP2 has put its own before it."""
    if not is_dtensor(weight) or weight.device_mesh.ndim != 1 + sharded:
        return ""
    ranks = weight.device_mesh.mesh
    row = ranks[weight.device_mesh.get_coordinate()[0]] if sharded else ranks
    return f"r{int(row.min())}"
