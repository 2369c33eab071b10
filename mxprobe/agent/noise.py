"""Weights that are not the trainer's own while somebody computes with them: noise added between two steps.

    eps = w_used - w_held      sigma = rms(eps) / rms(w_held)      evenness = tr(C)^2 / (n tr(C^2)),  C = eps eps^T

w_held is what the optimizer left, w_used what a forward pass of the next step computes with. Independent noise has an
evenness of 1 / (1 + n / K) for eps [n, K], so at least .5; a merged adapter of rank r at most r / n. Adaptive
quantization noise goes on the weights of the norms (QeRL) or of the Linears (arXiv 2605.20402); a Linear behind a noisy
norm shows nothing of it, which is why the norms are watched too.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from mxprobe.agent.guard import Guard, in_backward, is_off_limits, is_plain, undisturbed
from mxprobe.agent.inventory import not_to_be_hooked
from mxprobe.agent.roots import named_modules
from mxprobe.agent.snapshot import event_now
from mxprobe.schema import Phase

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


class NormWatch:
    """Copies the weights of norms in a probed step. `arm` and `finish` between steps, in the training thread."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._norms: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._handles: list[Any] = []
        self._pid = os.getpid()
        self._forget()

    def _forget(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._used: dict[str, dict[str, torch.Tensor]] = {}
        self._pending: dict[str, torch.Tensor] = {}

    def watch(self, roots: Sequence[nn.Module]) -> list[Any]:
        """Find the norms; returns handles, each with a `remove`."""
        barred = not_to_be_hooked(list(roots))
        for name, module in named_modules(list(roots)):
            if "norm" in type(module).__name__.lower() and id(module) not in barred and _weight(module) is not None:
                self._norms.append((name, weakref.ref(module)))
        return [self]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def arm(self) -> None:
        self.remove()
        self._forget()
        for name, reference in self._norms:
            module = reference()
            weight = _weight(module) if module is not None else None
            if module is None or weight is None:
                continue
            with undisturbed(weight.device.type):
                self._held[name] = weight.detach().clone()
            self._handles.append(module.register_forward_hook(self._hook_of(name)))

    def finish(self) -> NormWeights | None:
        """What the step that is over has shown; None if nothing was armed or called."""
        self.remove()
        for name, weight in self._pending.items():
            self._note(Phase.EVAL, name, weight)
        held, used = self._held, self._used
        self._forget()
        if not used:
            return None
        device = next(iter(held.values())).device
        return NormWeights(held, used, device, event_now(device))

    def _hook_of(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or os.getpid() != self._pid:
                return
            try:
                if args and is_plain(args[0]) and not is_off_limits(args[0]) and not in_backward():
                    self._on_call(name, module, args[0])
            except Exception as error:
                self._guard.swallow(f"weights of {name}", error)

        return hook

    def _on_call(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Without gradient: one token is a generation's decode step, and what came before it was its prefill; several
        tokens are an evaluation unless a decode step follows."""
        if not torch.is_grad_enabled() and x.dim() >= 3 and x.shape[1] == 1:
            self._pending.pop(name, None)
            self._note(Phase.ROLLOUT, name, module)
            return
        pending = self._pending.pop(name, None)
        if pending is not None:
            self._note(Phase.EVAL, name, pending)
        if torch.is_grad_enabled():
            self._note(Phase.TRAIN, name, module)
        elif name not in self._used.get(Phase.EVAL.value, {}):
            copied = self._copy(name, module)
            if copied is not None:
                self._pending[name] = copied

    def _note(self, phase: Phase, name: str, source: nn.Module | torch.Tensor) -> None:
        used = self._used.setdefault(phase.value, {})
        if name not in used:
            weight = source if isinstance(source, torch.Tensor) else self._copy(name, source)
            if weight is not None:
                used[name] = weight

    def _copy(self, name: str, module: nn.Module) -> torch.Tensor | None:
        weight, held = _weight(module), self._held.get(name)
        if weight is None or held is None or weight.shape != held.shape or weight.dtype != held.dtype:
            return None
        with undisturbed(weight.device.type):
            return weight.detach().clone()


def _weight(module: nn.Module) -> torch.Tensor | None:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight if weight is not None and is_plain(weight) and weight.is_floating_point() else None


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
