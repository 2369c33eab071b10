"""The weight that a Linear multiplies by, read without changing anything the module keeps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mxprobe.agent.guard import is_plain
from mxprobe.agent.sampling import sample_tiles, take


@dataclass(frozen=True)
class WeightSample:
    """Copies of what the three GEMMs read of W [O, K].

    Rows serve the forward product (blocks along K), columns the backward one (blocks along O). They are one
    tensor where W is small enough to be copied whole.
    """

    rows: torch.Tensor
    """[O_s, K]: sampled output features."""
    columns: torch.Tensor
    """[O, K_s]: sampled input features."""
    bias: torch.Tensor | None
    """[O_s], or None."""
    out_index: torch.Tensor | None
    in_index: torch.Tensor | None

    @property
    def out_frac(self) -> float:
        return self.rows.shape[0] / self.columns.shape[0]

    @property
    def in_frac(self) -> float:
        return self.columns.shape[1] / self.rows.shape[1]


def sample_weight(module: nn.Linear, *, max_features: int, seed: int) -> WeightSample | None:
    """Copy the sampled rows and columns of the module's current weight; None where it is no plain tensor."""
    weight = effective_weight(module)
    if not is_plain(weight) or weight.dim() != 2:
        return None
    out_features, in_features = weight.shape
    out_index = sample_tiles(out_features, max_features, seed=seed, device=weight.device)
    in_index = sample_tiles(in_features, max_features, seed=seed + 1, device=weight.device)
    rows = take(weight, out_index)
    columns = rows if out_index is None and in_index is None else take(weight, in_index, dim=1)
    bias = dict(module.named_parameters(recurse=False)).get("bias")
    bias = take(bias, out_index) if bias is not None and is_plain(bias) else None
    return WeightSample(rows, columns, bias, out_index, in_index)


def effective_weight(module: nn.Linear) -> Any:
    """`module.weight`, with a parametrization evaluated on copies of its modules.

    A parametrization may keep state (spectral norm iterates in place at every read) or draw random numbers;
    reading `module.weight` once more would then change the run. The copies are in evaluation mode, which for
    spectral norm yields the weight of the forward that has just run.
    """
    if not is_parametrized(module, "weight"):
        return module.weight
    chain: Any = module.parametrizations.weight  # pyright: ignore[reportAttributeAccessIssue]
    steps: list[Any] = [copy.deepcopy(step).eval() for step in chain]
    originals = [p for name, p in chain.named_parameters(recurse=False) if name.startswith("original")]
    with torch.random.fork_rng(devices=[]):
        value: Any = steps[0](*originals)
        for step in steps[1:]:
            value = step(value)
    return value
