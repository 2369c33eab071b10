"""Adapters of fused experts and of routers.

Read from transformers 5.24: Qwen3Moe, Qwen2Moe, Mixtral, DeepSeek V3, GLM-4 MoE, OLMoE, GPT-OSS (weights [E, K, O],
biases added apart), Llama 4 (weights [E, K, O], every expert in one batched product).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import Adapter, Reading, Unread, first_argument, held, unreadable
from mxprobe.measuring.adapters.expert_structure import expert_parameters, is_router
from mxprobe.measuring.isolation import is_plain

_LOGITS_PLACE = {"Llama4Router": 1}
"""Where in a router's result the logits are, if not first."""


class ExpertsAdapter(Adapter):
    """Parameters [E, a, b]; the GEMMs are watched as they are called, by `ExpertsProbe`."""

    family = "fused experts"
    argument = "hidden_states"

    def recognises(self, module: nn.Module) -> bool:
        return bool(expert_parameters(module))

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(expert_parameters(module))

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        _, a, b = expert_parameters(module)[part].shape
        return (b, a) if held(module, "is_transposed", False) is True else (a, b)

    def weight(self, module: nn.Module, part: str) -> Any:
        return expert_parameters(module).get(part)

    def read(
        self, module: nn.Module, part: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Reading | Unread:
        x = first_argument(args, kwargs, self.argument)
        if not is_plain(x):
            return unreadable(x, output)
        return Reading(x, _first_tensor(output), None)


class RouterAdapter(Adapter):
    """weight [E, K] and, in some, bias [E]; the logits [..., E] are the first tensor of what it returns."""

    family = "router"
    argument = "hidden_states"

    def recognises(self, module: nn.Module) -> bool:
        return is_router(module)

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        out_features, in_features = held(module, "weight").shape
        return out_features, in_features

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        bias = held(module, "bias")
        return bias if is_plain(bias) else None

    def output_of(self, module: nn.Module, output: Any) -> Any:
        return logits_of(module, output)

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        rows = x.reshape(-1, x.shape[-1])
        n_experts = held(module, "weight").shape[0]
        if y.shape[-1:] != (n_experts,) or y.numel() != rows.shape[0] * n_experts:
            return f"a result of shape {tuple(y.shape)} is no product of its weight"
        return Reading(rows, y, y)


def logits_of(module: nn.Module, output: Any) -> Any:
    """Return the router's logits out of what it returned."""
    if isinstance(output, tuple):
        place = _LOGITS_PLACE.get(type(module).__name__, 0)
        return output[place] if place < len(output) else None
    return output


def chosen_of(output: Any, n_rows: int) -> torch.Tensor | None:
    """Return the experts that a router chose, int64 [n_rows, k]; None where what it returned does not tell."""
    for each in output if isinstance(output, tuple) else ():
        if is_plain(each) and each.dtype == torch.int64 and each.dim() == 2 and each.shape[0] == n_rows:
            return each
    return None


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, (tuple, list)):
        return next((each for each in output if is_plain(each)), None)
    return output if is_plain(output) else None
