"""Do generation and training send the same token to the same experts? Router by router, in a probed step.

Compared are the positions that predict a generated token, those whose log-probabilities are measured: in generation the
prefill's last and each decode step, in training the same place of the row in which the sequence is found again. The
owner says what forward is under way, as for `StreamTap`.

S = sequences of the generation, n = measured positions, k = experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.agent.probes.forward_hooks import ForwardHooks, Guarded
from mxprobe.measuring.adapters.expert_structure import is_router
from mxprobe.measuring.adapters.fused_experts import chosen_of
from mxprobe.measuring.adapters.module_names import named_modules
from mxprobe.measuring.adapters.weight_modules import not_to_be_hooked
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.tokens.generation import Generation, is_measured, measured_positions
from mxprobe.measuring.tokens.matching import Match
from mxprobe.measuring.tokens.routing_flips import Flips

MAX_MICRO_BATCHES = 16


class _Training(NamedTuple):
    """A training forward: where the sequences are in it, and the experts of each router, int32 [S, n, k]."""

    match: Match
    shape: tuple[int, int]
    chosen: dict[str, torch.Tensor]


class RoutingTap(ForwardHooks):
    """`watch` at attach, `arm` before a probed step; told of every forward; all in the training thread."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self._generation: Generation | None = None
        self._rollout: dict[str, list[torch.Tensor]] = {}
        self._training: list[_Training] = []
        self._is_training = False
        self._enabled = False

    def watch(self, roots: Sequence[nn.Module], guarded: Guarded) -> None:
        """Find the routers; `guarded` makes a hook of a function of input and output."""
        barred = not_to_be_hooked(list(roots))
        for name, module in named_modules(list(roots)):
            if is_router(module) and id(module) not in barred:
                hook = guarded(lambda x, out, name=name: self._on_router(name, out))
                self.add(module, hook)

    def prefill(self, generation: Generation | None) -> None:
        """A forward without gradient begins: the prefill of this generation, or of none."""
        if not self._training:
            self._generation, self._rollout = generation, {}
            self._enabled, self._is_training = generation is not None, False

    def decode(self, generation: Generation | None) -> None:
        """A one-token forward of this generation begins, its token taken."""
        self._enabled = False
        if generation is not None and generation is self._generation:
            self._enabled = is_measured(len(generation.tokens))
        self._is_training = False

    def training(self, match: Match, shape: tuple[int, int]) -> None:
        """A training forward of [rows, tokens] begins, with these rows for the sequences of the generation."""
        self._is_training = True
        self._enabled = bool(self._rollout) and len(self._training) < MAX_MICRO_BATCHES
        if self._enabled:
            self._training.append(_Training(match, shape, {}))

    def _on_router(self, name: str, output: Any) -> None:
        generation = self._generation
        if not self._enabled or generation is None:
            return
        if self._is_training:
            rows, tokens = self._training[-1].shape
        else:
            rows = generation.n_batch
            tokens = generation.prompt.shape[1] if not generation.tokens else 1
        chosen = chosen_of(output, rows * tokens)
        if chosen is None:
            return
        with undisturbed(chosen.device.type):
            shaped = chosen.detach().reshape(rows, tokens, -1)
            if not self._is_training:
                held = self._rollout.setdefault(name, [])
                held.append(shaped[:, -1].index_select(0, generation.index).to(torch.int32))
            elif name not in self._training[-1].chosen:
                match = self._training[-1].match
                at = measured_positions(len(generation.tokens), chosen.device)
                place = (match.start[:, None] + at - 1).clamp(0, tokens - 1)
                self._training[-1].chosen[name] = shaped[match.row[:, None], place].to(torch.int32)

    def finish(self) -> Flips | None:
        """What the step that is over has given, on the device; None if nothing can be compared."""
        generation, training, rollout = self._generation, self._training, self._rollout
        self.forget()
        if generation is None or not training:
            return None
        n = len(measured_positions(len(generation.tokens), torch.device("cpu")))
        differing: dict[str, torch.Tensor] = {}
        found = torch.zeros_like(training[0].match.found)
        for name, parts in rollout.items():
            if len(parts) < n or not all(name in each.chosen for each in training):
                continue
            made = torch.stack(parts[:n], 1)
            seen, found = torch.zeros_like(made), torch.zeros_like(found)
            for each in training:
                new = each.match.found & ~found
                seen = torch.where(new[:, None, None], each.chosen[name], seen)
                found = found | new
            differing[name] = (made[..., None] != seen[..., None, :]).all(-1).sum(-1)
        top_k = {name: rollout[name][0].shape[-1] for name in differing}
        return Flips(differing, top_k, found) if differing else None
