"""Finds generated sequences again in the batches that are trained on, by their tokens, without waiting for the device.

S = generated sequences, n = tokens generated, B = sequences of the batch, T = its length as padded, L = compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxprobe.measuring.tokens.generation import Generation

_NOTHING = -1
_MAX_COMPARED = 1 << 26
"""Elements of one comparison [B, S, L]; a batch beyond it is compared for fewer sequences at a time."""


class Match(NamedTuple):
    found: torch.Tensor
    """bool [S]: the sequence is in the batch."""
    row: torch.Tensor
    """int64 [S]: where."""
    start: torch.Tensor
    """int64 [S]: position of its first generated token there."""


def match(generation: Generation, ids: torch.Tensor) -> Match:
    """Find rows of ids int64 [B, T] that begin with a generated sequence, padding on the left aside.

    A sequence found twice is taken where it comes first: after the same tokens stands the same policy.
    """
    pad = generation.sampling.pad
    made, lead_made = left_aligned(torch.cat((generation.prompt, torch.stack(generation.tokens, 1)), 1), pad)
    batch, lead_batch = left_aligned(ids, pad)
    prompt_length = generation.prompt.shape[1] - lead_made
    n_valid = prompt_length + generation.lengths()
    length = min(made.shape[1], batch.shape[1])
    at = torch.arange(length, device=ids.device)
    stride = max(_MAX_COMPARED // max(len(batch) * length, 1), 1)
    founds: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for begin in range(0, len(made), stride):
        part, ends = made[begin : begin + stride, :length], n_valid[begin : begin + stride]
        same = (batch[:, None, :length] == part) | (at >= ends[:, None])
        fits = same.all(-1) & (ends <= length)
        founds.append(fits.any(0))
        rows.append(fits.int().argmax(0))
    row = torch.cat(rows)
    return Match(torch.cat(founds), row, lead_batch[row] + prompt_length)


def left_aligned(ids: torch.Tensor, pad: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [B, T] without leading padding (filled with -1 on the right), and how much there was, int64 [B]."""
    if pad is None:
        return ids, ids.new_zeros(len(ids))
    lead = (ids == pad).long().cumprod(1).sum(1)
    source = torch.arange(ids.shape[1], device=ids.device) + lead[:, None]
    inside = source < ids.shape[1]
    return ids.gather(1, source.clamp(max=ids.shape[1] - 1)).masked_fill(~inside, _NOTHING), lead
