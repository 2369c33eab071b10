"""The models of the parallel plans, in float64, and the collectives that a framework would put around experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOKENS, HIDDEN, FFN = 128, 128, 128


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Block(nn.Module):
    """norm -> up -> gelu -> down, with a residual; `layer_idx` as transformers' blocks have it."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.up = nn.Linear(HIDDEN, FFN, bias=False, dtype=torch.float64)
        self.down = nn.Linear(FFN, HIDDEN, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.up.weight.copy_(values(10 * layer_idx + 1, FFN, HIDDEN) / HIDDEN**0.5)
            self.down.weight.copy_(values(10 * layer_idx + 2, HIDDEN, FFN) / FFN**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers `first` to `last` of a model of two; all by default."""

    def __init__(self, first: int = 0, last: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(i) for i in range(first, last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Expert(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.up.weight.copy_(values(seed, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class MoELayer(nn.Module):
    """megatron-core 0.16.1's names: `local_expert_indices`, `experts.local_experts`, `layer_number` from 1.

    Token t goes to expert t % 4; ranks of `group` hold the experts and add up what theirs give.
    """

    def __init__(self, layer_number: int, indices: list[int], group: Any = None) -> None:
        super().__init__()
        self.layer_number, self.local_expert_indices, self._group = layer_number, indices, group
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(Expert(100 * layer_number + e) for e in indices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = torch.arange(x.shape[1]) % 4
        given = x if self._group is None else _Copy.apply(x, self._group)
        out = torch.zeros_like(x)
        for index, expert in zip(self.local_expert_indices, self.experts.local_experts, strict=True):
            mine = routed == index
            out = out.index_add(1, mine.nonzero()[:, 0], expert(given[:, mine]))
        return x + (out if self._group is None else _Sum.apply(out, self._group))


class _Copy(torch.autograd.Function):
    """x; backward, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; backward, the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Experts(nn.Module):
    """Layers of the numbers given, with the experts given of each."""

    def __init__(self, experts: list[int], numbers: list[int], group: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoELayer(number, experts, group) for number in numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FUSED_WIDTH = 64
"""Of features: all of them are measured."""


class FusedExperts(nn.Module):
    """Four experts as two parameters; of `mesh`, each rank's own as DTensors sharded by their first dimension."""

    def __init__(self, layer_idx: int, mesh: Any = None) -> None:
        super().__init__()
        for name, seed in (("up_proj", 7), ("down_proj", 8)):
            w = values(1000 * layer_idx + seed, 4, FUSED_WIDTH, FUSED_WIDTH) / FUSED_WIDTH**0.5
            self.register_parameter(name, nn.Parameter(w if mesh is None else _by_experts(w, mesh)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        up, down = (getattr(p, "to_local", lambda p=p: p)() for p in (self.up_proj, self.down_proj))
        first = 0 if up.shape[0] == 4 else self.up_proj.device_mesh.get_local_rank() * up.shape[0]
        routed = torch.arange(hidden_states.shape[1]) % 4
        out = torch.zeros_like(hidden_states)
        for i in range(up.shape[0]):
            mine = routed == first + i
            hidden = F.gelu(F.linear(hidden_states[0, mine], up[i]))
            out = out.index_add(1, mine.nonzero()[:, 0], F.linear(hidden, down[i])[None])
        return out


def _by_experts(w: torch.Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None)


class FusedModel(nn.Module):
    """Layers of the indices given."""

    def __init__(self, indices: list[int], mesh: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FusedLayer(i, mesh) for i in indices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class FusedLayer(nn.Module):
    def __init__(self, layer_idx: int, mesh: Any) -> None:
        super().__init__()
        self.layer_idx, self._group = layer_idx, None if mesh is None else mesh.get_group()
        self.experts = FusedExperts(layer_idx, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return x + self.experts(x)
        return x + _Sum.apply(self.experts(_Copy.apply(x, self._group)), self._group)
