"""Real inputs for a model: a text file's lines, or arrays of token ids, as a few padded batches.

| file          | holds                                                                            |
|---------------|----------------------------------------------------------------------------------|
| *.npy         | integers [n, T], or [T]: token ids                                               |
| *.safetensors | `input_ids` [n, T] and, where some are padding, `attention_mask` [n, T]          |
| anything else | UTF-8 text, a sequence a line, tokenized with the checkpoint's own tokenizer     |

A directory stands for its .txt, .npy and .safetensors files. Where there are more sequences than are wanted, those
taken are spread evenly over them. B = sequences of a batch, T = tokens of its longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mxprobe.errors import UsageError

from .spacing import evenly

SEQUENCES_PER_BATCH = 4
MAX_TOKENS = 512
"""Longer sequences are cut."""

Tokenize = Callable[[Sequence[str]], "list[list[int]]"]


@dataclass(frozen=True)
class Batch:
    input_ids: torch.Tensor
    """int64 [B, T], padded at the end."""
    attention_mask: torch.Tensor
    """int64 [B, T]: 1 for a token, 0 for padding."""

    @property
    def n_tokens(self) -> int:
        return int(self.attention_mask.sum())


@dataclass(frozen=True)
class Inputs:
    batches: tuple[Batch, ...]
    n_sequences: int
    """Sequences in the batches, chosen from `n_available`."""
    n_available: int
    n_cut: int
    """Sequences that were longer than the limit."""

    @property
    def n_tokens(self) -> int:
        return sum(batch.n_tokens for batch in self.batches)


def calibration_files(path: Path) -> list[Path]:
    """List the files that `path` stands for. UsageError when there are none."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".npy", ".safetensors"))
        if not files:
            raise UsageError(
                f"{path} holds no calibration file",
                cause="it has no .txt, .npy or .safetensors file",
                remedy="give a text file with a sequence a line, or an array of token ids",
            )
        return files
    if not path.exists():
        raise UsageError(f"no calibration file at {path}", remedy="give a text file, or an array of token ids")
    return [path]


def read_inputs(
    files: Sequence[Path], tokenize: Tokenize, *, n_batches: int, vocabulary: int, max_tokens: int = MAX_TOKENS
) -> Inputs:
    """Read `n_batches` batches of at most `SEQUENCES_PER_BATCH` sequences; fewer in each, then fewer, if these run out.

    Raises:
        UsageError: a file that cannot be read, no sequence of two tokens or more, ids outside of the vocabulary.
    """
    sequences: list[list[int]] = []
    where = files[0] if len(files) == 1 else files[0].parent
    for file in files:
        sequences += _sequences(file, tokenize)
    sequences = [ids for ids in sequences if len(ids) > 1]
    if not sequences:
        raise UsageError(f"{where} holds no sequence of two tokens or more", cause="an empty file, or blank lines only")
    taken = [sequences[i] for i in evenly(len(sequences), n_batches * SEQUENCES_PER_BATCH)]
    for ids in taken:
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise UsageError(
                f"{where}: token id {max(ids) if min(ids) >= 0 else min(ids)} is outside of the model's vocabulary of "
                f"{vocabulary}",
                cause="the ids were made by another model's tokenizer",
            )
    n_batches = min(n_batches, len(taken))
    bounds = [i * len(taken) // n_batches for i in range(n_batches + 1)]
    groups = [taken[first:last] for first, last in pairwise(bounds)]
    batches = tuple(_batch([ids[:max_tokens] for ids in group]) for group in groups)
    return Inputs(batches, len(taken), len(sequences), sum(len(ids) > max_tokens for ids in taken))


def _batch(sequences: list[list[int]]) -> Batch:
    length = max(map(len, sequences))
    return Batch(
        torch.tensor([ids + [0] * (length - len(ids)) for ids in sequences]),
        torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in sequences]),
    )


def _sequences(file: Path, tokenize: Tokenize) -> list[list[int]]:
    if file.suffix == ".npy":
        return _rows(file, _read_npy(file))
    if file.suffix == ".safetensors":
        return _rows(file, *_read_safetensors(file))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    return tokenize(lines) if lines else []


def _read_npy(file: Path) -> torch.Tensor:
    import numpy as np

    try:
        array: Any = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is not a numpy array: {error}") from None
    if array.dtype.kind not in "iu":
        raise UsageError(f"{file} holds {array.dtype}, not token ids", remedy="save integers [n, T]")
    return torch.from_numpy(array.astype(np.int64))


def _read_safetensors(file: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    ids = tensors.get("input_ids")
    if ids is None or ids.is_floating_point():
        held = ", ".join(f"{name} ({tensor.dtype})" for name, tensor in tensors.items())
        raise UsageError(f"{file} holds no integers `input_ids` [n, T]", cause=f"it holds {held or 'nothing'}")
    return ids, tensors.get("attention_mask")


def _rows(file: Path, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[list[int]]:
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
        shapes = f"{list(ids.shape)}" + ("" if mask is None else f" with a mask of {list(mask.shape)}")
        raise UsageError(f"{file}: token ids must be [n, T], not {shapes}")
    if mask is None:
        return ids.tolist()
    return [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
