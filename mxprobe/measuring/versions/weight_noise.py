"""Weights that are not the trainer's own while somebody computes with them: noise added between two steps.

    eps = w_used - w_held      sigma = rms(eps) / rms(w_held)      evenness = tr(C)^2 / (n tr(C^2)),  C = eps eps^T

w_held is what the optimizer left, w_used what a forward pass of the next step computes with. Independent noise has an
evenness of 1 / (1 + n / K) for eps [n, K], so at least .5; a merged adapter of rank r has at most r / n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

EVENT = "weight_noise"


EVEN = 0.3
"""Evenness over which a change of a matrix is called noise; under it, a change of low rank."""


class Change(NamedTuple):
    """How the weights used differ from those that the optimizer left."""

    sigma: float
    evenness: float
    """NaN for a vector."""

    @property
    def words(self) -> str:
        if self.evenness < EVEN:
            return f"a change of low rank, of relative rms {self.sigma:.3g}: a merged adapter"
        return f"noise of relative rms {self.sigma:.3g}"


def change(used: torch.Tensor, held: torch.Tensor) -> Change | None:
    """Of w [n, K] or [K], both of one shape; None where every bit is the same."""
    if torch.equal(used, held):
        return None
    eps = used.double() - held.double()
    norm2 = float(held.double().square().sum())
    eps2 = float(eps.square().sum())
    sigma = math.sqrt(eps2 / norm2) if norm2 else math.inf
    if eps.dim() != 2 or min(eps.shape) < 2:
        return Change(sigma, math.nan)
    short = eps if eps.shape[0] <= eps.shape[1] else eps.T
    gram2 = float((short @ short.T).square().sum())
    return Change(sigma, eps2 * eps2 / (short.shape[0] * gram2) if gram2 else math.nan)


class NormWeights(NamedTuple):
    """Of one step: the norms' weights as the optimizer left them, and as each phase first used them."""

    held: Mapping[str, torch.Tensor]
    used: Mapping[str, Mapping[str, torch.Tensor]]
    """phase -> name -> [K]"""
    device: torch.device
    ready: Any

    def changes(self) -> dict[str, dict[str, Change | None]]:
        """phase -> name -> change; waits for the device."""
        return {
            phase: {name: change(w.cpu(), self.held[name].cpu()) for name, w in named.items()}
            for phase, named in self.used.items()
        }


class NoiseState:
    """Turns what the steps show into events, each told when it begins and when it ends. Called by the worker only."""

    def __init__(self) -> None:
        self._noisy: set[str] = set()

    def of_linear(self, module: str, phase: str, found: Change | None) -> str:
        """The detail of an event, or an empty string."""
        what = f"{module} {phase}"
        return self._tell(what, f"{what}: weights differ from the trainer's own by ", found)

    def of_norms(self, phase: str, found: Mapping[str, Change | None]) -> str:
        """One event for all norms of a phase."""
        changed = sorted((c for c in found.values() if c is not None), key=lambda c: c.sigma)
        what = f"norms {phase}"
        start = f"{what}: the weights of {len(changed)} of {len(found)} norms differ from the trainer's own by "
        return self._tell(what, start, changed[len(changed) // 2] if changed else None)

    def _tell(self, what: str, start: str, found: Change | None) -> str:
        was_noisy = what in self._noisy
        if found is None:
            self._noisy.discard(what)
            return f"{what}: the trainer's own weights again" if was_noisy else ""
        self._noisy.add(what)
        return "" if was_noisy else start + found.words
