"""`torch.nn.Linear` and its subclasses: x is the first argument, y the result, W the weight.

Fake-quantized subclasses of torchao, verl and ModelOpt keep the name and the meaning of `weight`, and round inside
`forward`: the hook sees the operands as they were before. Their own files pin their signatures.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mxprobe.measuring.adapters.adapter import Adapter, Reading, Unread, held
from mxprobe.measuring.compat import own_parts
from mxprobe.measuring.isolation import is_plain, kind_of


class LinearAdapter(Adapter):
    family = "torch.nn.Linear"

    def recognises(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def shape(self, module: nn.Module, part: str) -> tuple[int, int]:
        assert isinstance(module, nn.Linear)
        return module.out_features, module.in_features

    def weight(self, module: nn.Module, part: str) -> Any:
        return effective_weight(module)

    def bias(self, module: nn.Module, part: str) -> torch.Tensor | None:
        bias = dict(module.named_parameters(recurse=False)).get("bias")
        return bias if bias is not None and is_plain(bias) else None

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        if not (y.is_floating_point() and y.dim() and y.shape[:-1].numel() == x.shape[:-1].numel()):
            return f"input is {kind_of(x)}, output {kind_of(y)}"
        return Reading(x, y, y)


def effective_weight(module: nn.Module) -> Any:
    """Return `module.weight`, with a parametrization evaluated on copies of its modules.

    A parametrization may keep state (spectral norm iterates in place at every read) or draw random numbers;
    reading `module.weight` once more would then change the run. The copies are in evaluation mode, which for
    spectral norm yields the weight of the forward that has just run.
    """
    if not is_parametrized(module, "weight"):
        return held(module, "weight") if "weight" in own_parts(module, "_parameters") else module.weight
    chain: Any = module.parametrizations.weight  # pyright: ignore[reportAttributeAccessIssue]
    steps: list[Any] = [copy.deepcopy(step).eval() for step in chain]
    originals = [p for name, p in chain.named_parameters(recurse=False) if name.startswith("original")]
    with torch.random.fork_rng(devices=[]):
        value: Any = steps[0](*originals)
        for step in steps[1:]:
            value = step(value)
    return value
