"""Sketches of the residual stream: what leaves each block of a model, projected to a few numbers per token.

    s = h R / sqrt(k)        R [H, k] of random signs, the same for every block, run and machine
    E |s|^2 = |h|^2          so |s_a - s_b|^2 / |s_a|^2 estimates the relative difference of two streams

H = hidden size, k = `SKETCH`, n = tokens. One token's ratio is good to about sqrt(2 / k); a median over many to less.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.isolation import is_plain
from mxprobe.measuring.replay.interception import hooked
from mxprobe.schema import Row

SKETCH = 32
MAX_TOKENS = 1024
"""Tokens of one forward that are projected, the first ones."""
_SEED = 0x6D78
GENERATION_TRAINING = "generation_training"
"""Comparison of the stream in generation with that in training."""


class Difference(NamedTuple):
    """How two sketches of the same tokens differ: float64 [] each, on their device."""

    n_tokens: int
    ref2: torch.Tensor
    """Sum over tokens of |s_a|^2."""
    diff2: torch.Tensor
    """Sum over tokens of |s_a - s_b|^2."""
    median_frac: torch.Tensor
    """Median over tokens of |s_a - s_b|^2 / |s_a|^2: a value that ties sends to another code moves few tokens."""


class LayerDifference(NamedTuple):
    """A row of table `layers` to be: how one layer's output differs between two runs."""

    layer: str
    depth: int
    comparison: str
    difference: Difference
    eps: float
    """Machine epsilon of the coarser dtype."""


def layer_rows(found: Iterable[LayerDifference]) -> list[Row]:
    """Return rows of table `layers` without when; one copy from the device, which waits for it."""
    found = list(found)
    if not found:
        return []
    sums = torch.stack([torch.stack(each.difference[1:]).cpu() for each in found]).tolist()
    return [
        {
            "layer": each.layer,
            "depth": each.depth,
            "comparison": each.comparison,
            "n_tokens": each.difference.n_tokens,
            **dict(zip(("ref2", "diff2", "median_frac"), values)),
            "eps": each.eps,
        }
        for each, values in zip(found, sums)
    ]


def blocks_of(root: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks in order, by name: the members of the longest ModuleList that no other one contains."""
    lists = [(name, module) for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [each for each in lists if not any(each[0].startswith(f"{name}.") for name, _ in lists)]
    if not outer:
        return {}
    name, longest = max(outer, key=lambda each: len(each[1]))
    return {f"{name}.{index}": block for index, block in enumerate(longest)}


def stream_of(output: Any) -> torch.Tensor | None:
    """Return the residual stream [B, T, H] in what a block returns; None where there is none."""
    stream: Any = output[0] if isinstance(output, (tuple, list)) and output else output
    return stream if is_plain(stream) and stream.dim() == 3 and stream.is_floating_point() else None


def projected(rows: torch.Tensor) -> torch.Tensor:
    """Project [..., H] to float64 [..., k]; the signs are hashes, the same on every machine."""
    columns = rows.detach().reshape(-1, rows.shape[-1]).T
    return (mxprobe_kernels.row_sketch(columns, SKETCH, seed=_SEED).T / SKETCH**0.5).reshape(*rows.shape[:-1], SKETCH)


def difference(a: torch.Tensor, b: torch.Tensor, found: torch.Tensor | None = None) -> Difference:
    """Compare sketches [n, k] of the same tokens; `found` bool [n] leaves tokens out without waiting for the device."""
    ref2, diff2 = a.square().sum(-1), (a - b).square().sum(-1)
    frac = diff2 / ref2.clamp(min=torch.finfo(torch.float64).tiny)
    if found is not None:
        ref2, diff2 = ref2 * found, diff2 * found
        frac = frac.masked_fill(~found, float("nan"))
    return Difference(len(a), ref2.sum(), diff2.sum(), frac.nanmedian())


class StreamSketches:
    """float64 [n, k] per block that returned a stream [B, T, H]; a block that is called again counts once."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor] = {}
        self.dtype = torch.float32
        """dtype of the stream, once seen."""

    def take(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stream = stream_of(output)
        if name in self.of or stream is None:
            return
        self.dtype = stream.dtype
        with torch.no_grad():
            self.of[name] = projected(stream.reshape(-1, stream.shape[-1])[:MAX_TOKENS])


@contextmanager
def sketched(root: nn.Module) -> Generator[StreamSketches]:
    """Sketch what leaves each block in the forwards inside."""
    sketches = StreamSketches()
    with hooked(blocks_of(root), sketches.take):
        yield sketches
