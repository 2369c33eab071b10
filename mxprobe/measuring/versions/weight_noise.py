"""Noise added to weights between two steps: they are not the trainer's own while somebody computes with them.

    eps = w_used - w_held      sigma = rms(eps) / rms(w_held)      evenness = tr(C)^2 / (n tr(C^2)),  C = eps eps^T

w_held is what the optimizer left, w_used what a forward pass of the next step computes with. Independent noise has an
evenness of 1 / (1 + n / K) for eps [n, K], so at least .5; a merged adapter of rank r has at most r / n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from mxprobe.events import NORMS, WEIGHT_NOISE, Event

EVEN = 0.3
"""Evenness over which a change of a matrix is called noise; under it, a change of low rank."""


class Change(NamedTuple):
    """How the weights used differ from those that the optimizer left."""

    sigma: float
    evenness: float
    """NaN for a vector."""


def change(used: torch.Tensor, held: torch.Tensor) -> Change | None:
    """Compare w [n, K] or [K], both of one shape; None where every bit is the same."""
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
    """The norms' weights of one step, as the optimizer left them and as each phase first used them."""

    held: Mapping[str, torch.Tensor]
    used: Mapping[str, Mapping[str, torch.Tensor]]
    """phase -> name -> [K]"""

    def changes(self) -> dict[str, dict[str, Change | None]]:
        """Return phase -> name -> change; waits for the device."""
        return {
            phase: {name: change(w.cpu(), self.held[name].cpu()) for name, w in named.items()}
            for phase, named in self.used.items()
        }


class NoiseState:
    """Turns what the steps show into events, each told when it begins and when it ends. Called by the worker only."""

    def __init__(self) -> None:
        self._noisy: set[tuple[str, str]] = set()

    def of_linear(self, module: str, phase: str, found: Change | None) -> Event | None:
        """Return the event that begins or ends the noise of a module in a phase, or None."""
        state = "low_rank" if found is not None and found.evenness < EVEN else "noise"
        return self._news(module, phase, found, state)

    def of_norms(self, phase: str, found: Mapping[str, Change | None]) -> Event | None:
        """Return one event for all norms of a phase, or None; of their changes it tells the median one."""
        changed = sorted((c for c in found.values() if c is not None), key=lambda c: c.sigma)
        counts = {"n_changed": len(changed), "n_norms": len(found)}
        middle = changed[len(changed) // 2] if changed else None
        return self._news(NORMS, phase, middle, "norms_noise", **counts)

    def _news(self, subject: str, phase: str, found: Change | None, state: str, **counts: int) -> Event | None:
        place = (subject, phase)
        was_noisy = place in self._noisy
        if found is None:
            self._noisy.discard(place)
            return Event(WEIGHT_NOISE, subject, "own", {"phase": phase}) if was_noisy else None
        self._noisy.add(place)
        data = {"phase": phase, **counts, "sigma": found.sigma}
        return None if was_noisy else Event(WEIGHT_NOISE, subject, state, data)
