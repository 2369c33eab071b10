"""Sketches of the residual stream: what leaves each block of a model, projected to a few numbers per token.

    s = h R / sqrt(k)        R [H, k] of random signs, the same for every block, run and machine
    E |s|^2 = |h|^2          so |s_a - s_b|^2 / |s_a|^2 estimates the relative difference of two streams

H = hidden size, k = `SKETCH`, n = tokens. One token's ratio is good to about sqrt(2 / k); a median over many to less.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.isolation import is_plain

SKETCH = 32
MAX_TOKENS = 1024
"""Of one forward; the first ones."""
_SEED = 0x6D78


class Difference(NamedTuple):
    """Of two sketches of the same tokens; on their device."""

    n_tokens: int
    ref2: torch.Tensor
    """Sum over tokens of |s_a|^2."""
    diff2: torch.Tensor
    """Sum over tokens of |s_a - s_b|^2."""
    median_frac: torch.Tensor
    """Median over tokens of |s_a - s_b|^2 / |s_a|^2: a value that ties sends to another code moves few tokens."""


def blocks_of(root: nn.Module) -> dict[str, nn.Module]:
    """The blocks in order, by name: the members of the longest ModuleList that is not within another's member."""
    lists = [(name, module) for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [each for each in lists if not any(each[0].startswith(f"{name}.") for name, _ in lists)]
    if not outer:
        return {}
    name, longest = max(outer, key=lambda each: len(each[1]))
    return {f"{name}.{index}": block for index, block in enumerate(longest)}


def stream_of(output: Any) -> torch.Tensor | None:
    """The residual stream [B, T, H] in what a block returns; None where there is none."""
    stream: Any = output[0] if isinstance(output, (tuple, list)) and output else output
    return stream if is_plain(stream) and stream.dim() == 3 and stream.is_floating_point() else None


def projected(rows: torch.Tensor) -> torch.Tensor:
    """[..., H] -> float64 [..., k]; the signs are hashes, the same on every machine."""
    columns = rows.detach().reshape(-1, rows.shape[-1]).T
    return (mxprobe_kernels.row_sketch(columns, SKETCH, seed=_SEED).T / SKETCH**0.5).reshape(*rows.shape[:-1], SKETCH)


def difference(a: torch.Tensor, b: torch.Tensor, found: torch.Tensor | None = None) -> Difference:
    """Sketches [n, k] of the same tokens; `found` bool [n] leaves tokens out without waiting for the device."""
    ref2, diff2 = a.square().sum(-1), (a - b).square().sum(-1)
    frac = diff2 / ref2.clamp(min=torch.finfo(torch.float64).tiny)
    if found is not None:
        ref2, diff2 = ref2 * found, diff2 * found
        frac = frac.masked_fill(~found, float("nan"))
    return Difference(len(a), ref2.sum(), diff2.sum(), frac.nanmedian())


class Residuals:
    """Context manager: `sketches` holds float64 [n, k] per block that returned a stream [B, T, H] within.

    A block that is called again counts once, its first call.
    """

    def __init__(self, root: nn.Module) -> None:
        self.sketches: dict[str, torch.Tensor] = {}
        self.dtype = torch.float32
        """Of the stream, once seen."""
        self._blocks = blocks_of(root)
        self._handles: list[Any] = []

    def __enter__(self) -> Residuals:
        for name, block in self._blocks.items():
            self._handles.append(block.register_forward_hook(lambda m, a, out, name=name: self._take(name, out)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, output: Any) -> None:
        stream = stream_of(output)
        if name in self.sketches or stream is None:
            return
        self.dtype = stream.dtype
        with torch.no_grad():
            self.sketches[name] = projected(stream.reshape(-1, stream.shape[-1])[:MAX_TOKENS])
