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

WATCHED_BYTES = 1 << 16
"""Of one version of one module, kept to tell which version generation computes with ..."""
MIN_WATCHED = 8
"""... but at least so many output features."""


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
    watched: torch.Tensor
    """[F, K]: the output features that `WeightHistory` keeps of every version; the same at each step."""
    watched_bias: torch.Tensor | None
    """[F]"""
    watched_index: torch.Tensor
    """[F]"""

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
    bias = _bias(module)
    index = watched_features(weight)
    is_all = out_index is None and len(index) == out_features
    return WeightSample(
        rows=rows,
        columns=columns,
        bias=None if bias is None else take(bias, out_index),
        out_index=out_index,
        in_index=in_index,
        watched=rows if is_all else take(weight, index),
        watched_bias=None if bias is None else take(bias, index),
        watched_index=index,
    )


def sample_watched(module: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight [F, K], bias [F] or None) of the watched output features; None where W is no plain tensor."""
    weight = effective_weight(module)
    if not is_plain(weight) or weight.dim() != 2:
        return None
    index, bias = watched_features(weight), _bias(module)
    return take(weight, index), None if bias is None else take(bias, index)


def _bias(module: nn.Linear) -> torch.Tensor | None:
    bias = dict(module.named_parameters(recurse=False)).get("bias")
    return bias if bias is not None and is_plain(bias) else None


def watched_features(weight: torch.Tensor) -> torch.Tensor:
    """[F] output features of W [O, K], evenly spaced, that are kept of every version; all where W is small."""
    out_features, in_features = weight.shape
    feature_bytes = max(in_features * weight.element_size(), 1)
    n = min(max(WATCHED_BYTES // feature_bytes, MIN_WATCHED), out_features)
    return torch.arange(n, device=weight.device) * out_features // max(n, 1)


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
