"""The weights of the norms in a probed step: those that the optimizer left, and those that each phase used.

Adaptive quantization noise goes on the weights of the norms (QeRL) or of the Linears (arXiv 2605.20402). A Linear
behind a noisy norm shows nothing of it, so the norms are watched too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.event_log import EventLog
from mxprobe.agent.guard import Guard, Hook
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.agent.phases import Phases
from mxprobe.measuring.adapters.module_names import named_modules
from mxprobe.measuring.adapters.weight_modules import not_to_be_hooked
from mxprobe.measuring.compat import in_backward
from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.measuring.phase_rules import Forward
from mxprobe.measuring.versions.weight_noise import NoiseState, NormWeights
from mxprobe.schema import Phase, TableRow


class Norms(Part):
    name = "norms"
    roles = (TRAINER,)

    def __init__(self, clock: Clock, guard: Guard, events: EventLog, phases: Phases) -> None:
        self._clock = clock
        self._guard = guard
        self._events = events
        self._phases = phases
        self._noise = NoiseState()
        self._norms: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._used: dict[str, dict[str, torch.Tensor]] = {}
        self._waiting: dict[str, tuple[Forward, torch.Tensor]] = {}
        """The first call of each of which it is not known yet what it was."""

    def watch(self, roots: Sequence[nn.Module]) -> None:
        barred = not_to_be_hooked(list(roots))
        for name, module in named_modules(list(roots)):
            if "norm" in type(module).__name__.lower() and id(module) not in barred and _weight(module) is not None:
                self._norms.append((name, weakref.ref(module)))

    def remove(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def begin(self) -> None:
        self.remove()
        self._forget()
        if not self._clock.is_watched:
            return
        for name, reference in self._norms:
            module = reference()
            weight = _weight(module) if module is not None else None
            if module is None or weight is None:
                continue
            with undisturbed(weight.device.type):
                self._held[name] = weight.detach().clone()
            self._handles.append(module.register_forward_hook(self._hook_of(name)))

    def finish(self) -> Iterable[Job]:
        self.remove()
        for name, (forward, weight) in self._waiting.items():
            self._note(forward.phase or Phase.EVAL, name, weight)
        held, used, step = self._held, self._used, self._clock.step
        self._forget()
        if not used:
            return ()
        device = next(iter(held.values())).device
        weights = NormWeights(held, used)
        return [Job(lambda: self._tell(weights, step), device, [event_now(device)], weights)]

    def _tell(self, weights: NormWeights, step: int) -> Iterable[TableRow]:
        """In the worker."""
        for phase, found in weights.changes().items():
            event = self._noise.of_norms(phase, found)
            if event is not None:
                self._events.write(event, step)
        return ()

    def _hook_of(self, name: str) -> Hook:
        def on_call(module: nn.Module, args: Any, output: Any) -> None:
            if args and is_plain(args[0]) and not is_off_limits(args[0]) and not in_backward():
                self._on_call(name, module, args[0])

        return self._guard.hook(f"weights of {name}", on_call)

    def _on_call(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        forward = self._phases.call((self.name, name), x)
        held = self._waiting.get(name)
        if held is not None and held[0].phase is not None:
            self._note(held[0].phase, name, held[1])
            del self._waiting[name]
        if forward.phase is not None:
            self._note(forward.phase, name, module)
        elif name not in self._waiting and name not in self._used.get(Phase.EVAL.value, {}):
            copied = self._copy(name, module)
            if copied is not None:
                self._waiting[name] = forward, copied

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
