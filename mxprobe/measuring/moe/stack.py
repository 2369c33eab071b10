"""The pieces of a snapshot as one tensor per operand: what a run that loops over experts and one grouped call share.

E = experts measured that were sent a token, R = rows copied of each, K = in features, O = out features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot, experts_of
from mxprobe.measuring.sampling import TILE


@dataclass
class Stack:
    experts: list[int]
    """Their numbers in the whole model."""
    rows: list[int]
    """Tokens each was sent."""
    there: torch.Tensor
    """bool [E, R]: a token, neither missing nor padding."""
    x: torch.Tensor
    """[E, R, K]"""
    y: torch.Tensor
    """[E, R, O_s], the bias taken off."""
    dtype: torch.dtype
    """In which y was returned."""
    weight_rows: torch.Tensor
    """[E, O_s, K]"""
    weight_columns: torch.Tensor
    """[E, O, K_s]"""
    gradient: torch.Tensor | None
    """[E, R, O]"""
    out_index: torch.Tensor | None
    in_index: torch.Tensor | None
    n_experts: int
    """Of the module."""
    n_called: int
    """Of these, sent a token."""
    n_one_token: int
    """Of those measured."""
    all_rows: int
    """Tokens sent to any expert."""
    n_rows: int
    """Tokens measured."""
    n_tiles: int
    """32-token tiles measured, the last of an expert short."""

    @property
    def sampled_frac(self) -> float:
        return self.n_rows / max(self.all_rows, 1)


def stack(snapshot: ExpertsSnapshot) -> Stack | None:
    """Copies from the device what says how many rows there are. None where no expert measured was sent a token."""
    pieces, layout = snapshot.pieces, snapshot.layout
    if layout is None:
        return None
    experts, counts = experts_of(pieces), torch.cat([piece.counts for piece in pieces]).tolist()
    kept = [i for i, n in enumerate(counts) if n]
    if not kept:
        return None
    index = torch.tensor(kept, device=pieces[0].x.device)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if len(kept) == len(whole) else whole.index_select(0, index)

    x, y = joined([p.x for p in pieces]), joined([p.y for p in pieces])
    there = joined([p.valid for p in pieces]) & (x != 0).any(-1)
    biases = [p.bias for p in pieces if p.bias is not None]
    gradients = [p.gradient for p in pieces if p.gradient is not None]
    every = snapshot.all_counts
    called = snapshot.n_seen if every is None else int((every > 0).sum())
    rows = [counts[i] for i in kept]
    measured = there.sum(1)
    return Stack(
        experts=[layout.first + experts[i] for i in kept],
        rows=rows,
        there=there,
        x=x,
        y=y if not biases else y.double() - joined(biases).double()[:, None, :],
        dtype=snapshot.dtype,
        weight_rows=joined([p.weight_rows for p in pieces]),
        weight_columns=joined([p.weight_columns for p in pieces]),
        gradient=joined(gradients) if len(gradients) == len(pieces) else None,
        out_index=layout.out_index,
        in_index=layout.in_index,
        n_experts=layout.n_experts,
        n_called=called,
        n_one_token=sum(n == 1 for n in rows),
        all_rows=snapshot.n_rows if every is None else int(every.sum()),
        n_rows=int(measured.sum()),
        n_tiles=int(((measured + TILE - 1) // TILE).sum()),
    )
