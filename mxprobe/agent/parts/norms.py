"""Weights that are not the trainer's own while somebody computes with them: noise added between two steps.

    eps = w_used - w_held      sigma = rms(eps) / rms(w_held)      evenness = tr(C)^2 / (n tr(C^2)),  C = eps eps^T

w_held is what the optimizer left, w_used what a forward pass of the next step computes with. Independent noise has an
evenness of 1 / (1 + n / K) for eps [n, K], so at least .5; a merged adapter of rank r at most r / n. Adaptive
quantization noise goes on the weights of the norms (QeRL) or of the Linears (arXiv 2605.20402); a Linear behind a noisy
norm shows nothing of it, which is why the norms are watched too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.guard import Guard
from mxprobe.measuring.adapters.inventory import not_to_be_hooked
from mxprobe.measuring.adapters.module_names import named_modules
from mxprobe.measuring.isolation import in_backward, is_off_limits, is_plain, undisturbed
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.measuring.versions.weight_noise import NormWeights
from mxprobe.schema import Phase


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
