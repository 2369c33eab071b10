"""The residual stream of the same tokens in generation and in training, block by block, in a probed step.

At the prefill of a generation the last tokens of each prompt are sketched behind every block; in the training forward
of the same sequences, the same tokens. Both stand after the same tokens, so that where the two differ by more than a
batch of another shape makes, the two paths compute something else: the first such block is where to look.

S = sequences of the generation, P = prompt tokens taken of each, k = numbers of a sketch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.agent.probes.forward_hooks import ForwardHooks, Guarded
from mxprobe.measuring.adapters.weight_modules import has_fused_path, not_to_be_hooked
from mxprobe.measuring.compat import is_compiled
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.replay.residual_stream import (
    GENERATION_TRAINING,
    LayerDifference,
    blocks_of,
    difference,
    projected,
    stream_of,
)
from mxprobe.measuring.tokens.generation import Generation
from mxprobe.measuring.tokens.matching import Match

PROMPT_TOKENS = 8
MAX_BLOCKS = 512


class _Side(NamedTuple):
    """Of one block: sketches [S, P, k], and which of the tokens are there, bool [S, P]."""

    sketch: torch.Tensor
    valid: torch.Tensor
    eps: float


class StreamTap(ForwardHooks):
    """Told by its owner what the forward under way is; its hooks sketch. All in the training thread."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = False
        self._depth: dict[str, int] = {}
        self.forget()

    def forget(self) -> None:
        self._generation: Generation | None = None
        self._match: Match | None = None
        self._rollout: dict[str, _Side] = {}
        self._train: dict[str, _Side] = {}
        self.enabled = False

    def watch(self, roots: Sequence[nn.Module], guarded: Guarded) -> None:
        """Find the blocks that a hook may be put on; `guarded` makes a hook of a function of input and output."""
        barred = not_to_be_hooked(list(roots))
        for root in roots:
            for name, block in list(blocks_of(root).items())[:MAX_BLOCKS]:
                if not (id(block) in barred or is_compiled(block) or has_fused_path(block)):
                    self._depth.setdefault(name, len(self._depth))
                    hook = guarded(lambda x, out, name=name: self._on_block(name, out))
                    self.add(block, hook)

    def prefill(self, generation: Generation | None) -> None:
        """A forward without gradient begins: the prefill of this generation, or of none."""
        if self._generation is None or not self._train:
            self._rollout = {}
            self._generation, self._match = generation, None
            self.enabled = generation is not None

    def decode(self) -> None:
        """A one-token forward begins."""
        self.enabled = False

    def training(self, match: Match | None) -> None:
        """A training forward begins, with these rows for the sequences of the generation."""
        self._match = match
        self.enabled = match is not None and bool(self._rollout) and not self._train

    def _on_block(self, name: str, output: Any) -> None:
        stream, generation = stream_of(output), self._generation
        if not self.enabled or stream is None or generation is None:
            return
        with undisturbed(stream.device.type):
            self._take(name, stream, generation)

    def _take(self, name: str, stream: torch.Tensor, generation: Generation) -> None:
        eps = torch.finfo(stream.dtype).eps
        n_prompt = generation.prompt.shape[1]
        p = min(PROMPT_TOKENS, n_prompt)
        match = self._match
        if match is None:
            if name not in self._rollout and stream.shape[:2] == (generation.n_batch, n_prompt):
                pad = generation.sampling.pad
                taken = generation.prompt[:, n_prompt - p :]
                valid = torch.ones_like(taken, dtype=torch.bool) if pad is None else taken != pad
                rows = stream[:, n_prompt - p :].index_select(0, generation.index)
                self._rollout[name] = _Side(projected(rows), valid, eps)
        elif name not in self._train:
            at = match.start[:, None] + torch.arange(-p, 0, device=stream.device)
            valid = match.found[:, None] & (at >= 0) & (at < stream.shape[1])
            rows = stream[match.row[:, None], at.clamp(0, stream.shape[1] - 1)]
            self._train[name] = _Side(projected(rows), valid, eps)

    def finish(self) -> list[LayerDifference]:
        """Return how each block's stream differed in the step that is over; on the device, nothing waited for."""
        rollout, train = self._rollout, self._train
        self.forget()
        found: list[LayerDifference] = []
        for name, a in train.items():
            b = rollout.get(name)
            if b is not None and a.sketch.shape == b.sketch.shape:
                valid = (a.valid & b.valid).reshape(-1)
                k = a.sketch.shape[-1]
                made = difference(a.sketch.reshape(-1, k), b.sketch.reshape(-1, k), valid)
                found.append(LayerDifference(name, self._depth[name], GENERATION_TRAINING, made, max(a.eps, b.eps)))
        return found
