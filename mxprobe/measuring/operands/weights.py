"""The weight that a Linear multiplies by, read without changing anything the module keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.families import adapter_of
from mxprobe.measuring.adapters.torch_linear import effective_weight as effective_weight
from mxprobe.measuring.isolation import is_plain
from mxprobe.measuring.sampling import sample_tiles, spread, take

CPU_MAX_FEATURES = 128
"""Features measured where a CPU does it: the products of the errors are nearly all that measuring costs there."""
WATCHED_BYTES = 1 << 16
"""Bytes kept of one version of one module, to tell which version generation computes with ..."""
MIN_WATCHED = 8
"""... in at least so many output features."""


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


def sample_weight(
    module: nn.Module, *, max_features: int, seed: int, part: str = "", given: torch.Tensor | None = None
) -> WeightSample | None:
    """Copy the sampled rows and columns of a module's current weight; None where it is no plain tensor.

    `part` names the GEMM where the module has several; `given` is the weight where the call was handed it.
    """
    weight, bias = weight_of(module, part) if given is None else (given, weight_of(module, part)[1])
    if not is_plain(weight) or weight.dim() != 2:
        return None
    if weight.device.type == "cpu":
        max_features = min(max_features, CPU_MAX_FEATURES)
    out_features, in_features = weight.shape
    out_index = sample_tiles(out_features, max_features, seed=seed, device=weight.device)
    in_index = sample_tiles(in_features, max_features, seed=seed + 1, device=weight.device)
    rows = take(weight, out_index)
    columns = rows if out_index is None and in_index is None else take(weight, in_index, dim=1)
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


def sample_watched(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight [F, K], bias [F] or None) of the watched output features; None where W is no plain tensor."""
    weight, bias = weight_of(module)
    if not is_plain(weight) or weight.dim() != 2:
        return None
    index = watched_features(weight)
    return take(weight, index), None if bias is None else take(bias, index)


def weight_of(module: nn.Module, part: str = "") -> tuple[Any, torch.Tensor | None]:
    """(W, bias that y contains) by the module's adapter; (None, None) where it has none."""
    adapter = adapter_of(module)
    return (None, None) if adapter is None else (adapter.weight(module, part), adapter.bias(module, part))


def watched_features(weight: torch.Tensor) -> torch.Tensor:
    """[F] output features of W [O, K], evenly spaced, that are kept of every version; all where W is small."""
    out_features, in_features = weight.shape
    feature_bytes = max(in_features * weight.element_size(), 1)
    n = min(max(WATCHED_BYTES // feature_bytes, MIN_WATCHED), out_features)
    return spread(n, out_features, weight.device)
