"""Where a causal language model turns tokens into vectors and vectors into logits, found by its structure alone.

    input_ids -> embedding -> ... -> norm -> lm_head -> logits

The lm_head is the Linear with as many outputs as the embedding has rows; the norm is the last module outside the
blocks that owns a vector of the hidden size. Both are guesses until a generation has shown that what the norm
returns is what the lm_head is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn


class Head(NamedTuple):
    embedding: nn.Embedding
    norm: nn.Module
    lm_head: nn.Linear
    owner: nn.Module
    """The module whose child the lm_head is: its output carries the logits."""


def find_head(roots: Sequence[nn.Module]) -> Head | str:
    """Return the head of the first root that has one, or why there is none, in words."""
    reasons = [_find(root) for root in roots]
    found = [each for each in reasons if isinstance(each, Head)]
    return found[0] if found else reasons[0] if reasons else "no model"


def _find(root: nn.Module) -> Head | str:
    embeddings = [m for m in root.modules() if isinstance(m, nn.Embedding)]
    pairs = [
        (embedding, lm_head, owner)
        for owner in root.modules()
        for lm_head in owner.children()
        if isinstance(lm_head, nn.Linear)
        for embedding in embeddings
        if (lm_head.out_features, lm_head.in_features) == (embedding.num_embeddings, embedding.embedding_dim)
    ]
    if not pairs:
        return "no Linear has the shape of an embedding: not a causal language model with an lm_head"
    embedding, lm_head, owner = max(pairs, key=lambda pair: pair[0].num_embeddings)
    norms = [m for m in _outside_blocks(owner) if m is not lm_head and _owns_vector(m, lm_head.in_features)]
    if not norms:
        return "no norm of the hidden size outside the blocks: the input of the lm_head cannot be taken in training"
    return Head(embedding, norms[-1], lm_head, owner)


def _outside_blocks(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if not isinstance(child, (nn.ModuleList, nn.Linear, nn.Embedding)):
            found += [child, *_outside_blocks(child)]
    return found


def _owns_vector(module: nn.Module, size: int) -> bool:
    return any(p.dim() == 1 and p.numel() == size for p in module.parameters(recurse=False))
