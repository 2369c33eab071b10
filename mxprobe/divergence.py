"""The first layer at which two ways of computing the same tokens part: two arms of a model, two engines, two hosts.

    a = sketch(model, input_ids)                          # here
    a.save("trainer.npz")
    first_divergence(load("trainer.npz"), load("engine.npz"), floor=load("trainer_other_batch.npz"))

A sketch is a few random projections of the residual stream behind each block, the same on every machine; it is small
(`SKETCH` numbers a token and block) and tells nothing of the text. In a running job the agent compares generation with
training by itself: table `layers`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import nn

from mxprobe.attribution.layer_divergence import COMPARISON, FACTOR, Divergence
from mxprobe.attribution.layer_divergence import first_divergence as _first_divergence
from mxprobe.errors import UsageError
from mxprobe.measuring.replay.floor import FLOOR
from mxprobe.measuring.replay.residual_stream import LayerDifference, blocks_of, difference, layer_rows, sketched

_TOKENS, _EPS, _BLOCK = "tokens", "eps", "block:"


@dataclass(frozen=True)
class Sketches:
    """Block name -> float64 [n, k], in the order of the blocks."""

    blocks: dict[str, npt.NDArray[np.float64]]
    tokens: str
    """Digest of the token ids."""
    eps: float
    """Machine epsilon of the stream's dtype."""

    def save(self, path: str | Path) -> None:
        """Write a compressed `.npz` without pickles."""
        arrays: dict[str, Any] = {f"{_BLOCK}{name}": value for name, value in self.blocks.items()}
        arrays |= {_TOKENS: np.array(self.tokens), _EPS: np.array(self.eps)}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)


def sketch(model: nn.Module, input_ids: torch.Tensor, **arguments: Any) -> Sketches:
    """Run `model(input_ids, **arguments)` and sketch the stream behind each block, of the first 1,024 tokens.

    input_ids: int64 [B, T]. Modes are the caller's: gradients, autocast, emulation. UsageError for a model without
    blocks.
    """
    if not blocks_of(model):
        raise UsageError(
            "the model has no list of blocks, so there is no residual stream to sketch",
            cause="no nn.ModuleList in it",
            remedy="give the transformer itself, not a wrapper that hides it",
        )
    with sketched(model) as found:
        model(input_ids, **arguments)
    digest = hashlib.blake2b(input_ids.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    blocks = {name: value.cpu().numpy() for name, value in found.of.items()}
    return Sketches(blocks, digest, torch.finfo(found.dtype).eps)


def load(path: str | Path) -> Sketches:
    """Read what `Sketches.save` wrote. UsageError where that is not what the file holds."""
    try:
        with np.load(path, allow_pickle=False) as file:
            blocks = {key.removeprefix(_BLOCK): file[key] for key in file.files if key.startswith(_BLOCK)}
            return Sketches(blocks, str(file[_TOKENS]), float(file[_EPS]))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} holds no sketches: {error}",
            cause="another file was meant, or the copy was cut",
            remedy="write it with `sketch(model, input_ids).save(path)`",
        ) from None


def first_divergence(
    a: Sketches, b: Sketches, *, floor: Sketches | None = None, factor: float = FACTOR
) -> Divergence | None:
    """Return the first block of a that b leaves by more than the floor; None without blocks.

    `layer` is None where no block is left.

    floor: a again, its batch put together otherwise. Without it the floor is the rounding of the stream's dtype alone.
    UsageError where they are not of the same tokens.
    """
    others = [b] if floor is None else [b, floor]
    if any(other.tokens != a.tokens for other in others):
        raise UsageError(
            "the sketches are of different tokens",
            cause="the batches differ, or their padding does",
            remedy="give both arms the same input_ids",
        )
    found: list[LayerDifference] = []
    for comparison, other in zip((COMPARISON, FLOOR), others, strict=False):
        for depth, (name, values) in enumerate(a.blocks.items()):
            if name in other.blocks and other.blocks[name].shape == values.shape:
                made = difference(torch.from_numpy(values), torch.from_numpy(other.blocks[name]))
                found.append(LayerDifference(name, depth, comparison, made, max(a.eps, other.eps)))
    rows = [{"step": 0, **row} for row in layer_rows(found)]
    return _first_divergence(pd.DataFrame(rows), factor=factor) if rows else None
