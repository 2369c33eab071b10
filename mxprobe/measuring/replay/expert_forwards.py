"""Routing replay: a forward pass in which every router chooses the experts that it chose in another one.

A router returns (logits, weights, experts), in some order: see `adapters`. Where its experts are exchanged, the weights
are those that it would have given them,

    w = s f(l)[experts] / sum, or without the sum    f: softmax or sigmoid of its logits l; s: a constant

in the first form that gives the run's own weights back to 1e-3. A router that none of them fits, that is called more
than once in a forward, or that does not return the experts (Llama 4's) is left with its own choice, and said so.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.expert_structure import is_router
from mxprobe.measuring.adapters.fused_experts import logits_of
from mxprobe.measuring.compat import in_backward
from mxprobe.measuring.isolation import is_plain
from mxprobe.measuring.replay.interception import hooked

TOLERANCE = 1e-3
"""Relative to the weights: they are returned in the model's dtype, and divided in it."""


class RoutingReplay:
    """`recording` around one forward pass, then `replaying` around another of the same tokens; not in training."""

    def __init__(self, root: nn.Module) -> None:
        self._routers = {name: module for name, module in root.named_modules() if is_router(module)}
        self._chosen: dict[str, torch.Tensor] = {}
        """Router -> int64 [T, k]."""
        self._n_calls: dict[str, int] = {}
        self._misfits: set[str] = set()
        self._n_replayed = torch.zeros((), dtype=torch.int64)

    @property
    def is_possible(self) -> bool:
        """Say whether there are routers, and all of them were recorded, once."""
        return bool(self._routers) and all(self._n_calls.get(name) == 1 for name in self._routers)

    @property
    def is_whole(self) -> torch.Tensor | None:
        """Return bool, on the device: every router took the recorded choice in the forward that has just been replayed.

        None where one could not, whatever its weights.
        """
        return None if self._misfits else self._n_replayed == len(self._routers)

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record each router's choice in the forward inside; what a backward pass computes again is not looked at."""
        with hooked(self._routers, self._record):
            yield

    @contextmanager
    def replaying(self) -> Generator[None]:
        self._n_replayed = torch.zeros((), dtype=torch.int64)
        with hooked(self._routers, self._exchange):
            yield

    def _record(self, name: str, router: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        self._n_calls[name] = self._n_calls.get(name, 0) + 1
        place = _experts_at(output)
        if place is None:
            self._misfits.add(name)
        else:
            self._chosen[name] = output[place].detach().clone()

    def _exchange(self, name: str, router: nn.Module, args: Any, output: Any) -> Any:
        experts, places = self._chosen.get(name), _places(router, output)
        if experts is None or places is None or in_backward():
            self._misfits.add(name)
            return None
        at_weights, at_experts = places
        logits, weights, own = logits_of(router, output), output[at_weights], output[at_experts]
        if own.shape != experts.shape:
            self._misfits.add(name)
            return None
        made, fits = _weights(logits, weights, own, experts)
        self._n_replayed = self._n_replayed.to(fits.device) + fits
        changed = list(output)
        changed[at_weights] = torch.where(fits, made.to(weights.dtype), weights)
        changed[at_experts] = torch.where(fits, experts, own)
        return tuple(changed)


def _weights(
    logits: torch.Tensor, weights: torch.Tensor, own: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of `experts` [T, k], and bool: the form found gives the router's own weights back."""
    best, fits = weights.float(), torch.zeros((), dtype=torch.bool, device=logits.device)
    for scores in (logits.float().softmax(-1), logits.float().sigmoid()):
        for is_normed in (True, False):
            given, wanted = (_form(scores, each, is_normed) for each in (own, experts))
            scale = weights.float().sum() / given.sum()
            off = (given * scale - weights.float()).abs().max()
            found = off <= TOLERANCE * weights.float().abs().max()
            best = torch.where(found & ~fits, wanted * scale, best)
            fits = fits | found
    return best, fits


def _form(scores: torch.Tensor, experts: torch.Tensor, is_normed: bool) -> torch.Tensor:
    chosen = scores.gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if is_normed else chosen


def _experts_at(output: Any) -> int | None:
    """Find where in a router's result the experts are, int64 [T, k]."""
    for i, each in enumerate(output if isinstance(output, tuple) else ()):
        if is_plain(each) and each.dtype == torch.int64 and each.dim() == 2:
            return i
    return None


def _places(router: nn.Module, output: Any) -> tuple[int, int] | None:
    """Find the places of the weights and of the experts; None where either is missing."""
    at_experts, logits = _experts_at(output), logits_of(router, output)
    if at_experts is None or not is_plain(logits):
        return None
    for i, each in enumerate(output):
        is_of_experts = is_plain(each) and each.is_floating_point() and each.shape == output[at_experts].shape
        if is_of_experts and each is not logits:
            return i, at_experts
    return None
