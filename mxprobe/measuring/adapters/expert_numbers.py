"""Which experts of the whole model a rank holds: under expert parallelism each rank's own begin at 0.

    first = rank of the expert-parallel group * experts of a rank

told by Megatron-Core 0.16.1's `MoELayer.local_expert_indices` above the module, or by the parameter itself where it is
a DTensor sharded by its first dimension (transformers 5.24's `MoEParamShard`, torchtitan).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import held
from mxprobe.measuring.adapters.tensor_parallel import is_dtensor
from mxprobe.measuring.isolation import is_plain


def first_experts(roots: Sequence[nn.Module]) -> dict[int, int]:
    """Return id of a module -> number in the whole model of its first expert, below every layer that says so."""
    found: dict[int, int] = {}
    for module in (module for root in roots for module in root.modules()):
        indices = held(module, "local_expert_indices")
        if isinstance(indices, (list, tuple)) and indices and list(indices) == list(range(indices[0], indices[-1] + 1)):
            found.update((id(each), int(indices[0])) for each in module.modules())
    return found


def own_experts(parameter: Any, first: int) -> tuple[torch.Tensor, int] | None:
    """Return this rank's matrices [E, a, b] and the number of the first; None where they are no whole matrices."""
    if is_plain(parameter):
        return parameter, first
    if not is_dtensor(parameter):
        return None
    mesh, spread = parameter.device_mesh, [(i, p) for i, p in enumerate(parameter.placements) if not p.is_replicate()]
    own = parameter._local_tensor
    if len(spread) != 1 or not spread[0][1].is_shard(0) or parameter.shape[0] % mesh.size(spread[0][0]):
        return None
    return (own, int(mesh.get_local_rank(spread[0][0])) * own.shape[0]) if is_plain(own) else None
