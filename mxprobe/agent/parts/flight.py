"""The flight recorder's ears: in every training step, two kinds of norm, and nothing is waited for.

    output    ||y||_2 of each leaf module's output, in order of execution; the largest of the step's calls
    gradient  ||g||_2 of each parameter, as the optimizer has just used it

float32; what is not finite, or too large to be squared, has a norm that is not finite. A sharded parameter (DTensor) is
represented by its local shard. `BlackBox` keeps and judges the norms, in the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.guard import Guard, Hook
from mxprobe.agent.part import Job, Part
from mxprobe.events import Event
from mxprobe.measuring.adapters.main_parameters import gradient_of
from mxprobe.measuring.adapters.module_names import named_modules, plain_name
from mxprobe.measuring.adapters.weight_modules import not_to_be_hooked
from mxprobe.measuring.compat import in_backward, local_shard, norms_of
from mxprobe.measuring.flight_memory import TABLE, BlackBox, Entry, Norms
from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.schema import Row, TableRow


class FlightRecorder(Part):
    """Keeps and judges the norms of the last steps, and writes them down where a trigger falls."""

    name = "flight recorder"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._taps = NormTaps(context.guard) if context.config.record else None
        self._black_box = BlackBox(context.config.follow_steps)

    def watch(self, roots: Sequence[nn.Module]) -> None:
        if not self._context.run.is_trainer:
            self._taps = None
        if self._taps is not None:
            self._taps.watch(roots, not_to_be_hooked(list(roots)))
            self._hand_over(self._taps.take(step=0))  # of the step just observed, whose gradients are there

    def finish(self) -> Iterable[Job]:
        if self._taps is not None:
            self._hand_over(self._taps.take(self._context.clock.step))
        return ()

    def remove(self) -> None:
        if self._taps is not None:
            self._taps.remove()

    def ask(self, frame: Mapping[str, Any]) -> None:
        """`trigger`: keep what is held, and go to full statistics."""
        if frame["verb"] == "trigger":
            reason, n_steps = str(frame.get("reason", "")), self._context.run.n_steps
            self._context.worker.put(lambda: self._keep(*self._black_box.trigger(reason), n_steps))

    def _hand_over(self, norms: Norms) -> None:
        if norms.ready:
            device, events = norms.ready[0][0], [event for _, event in norms.ready]
            self._context.hand_over(Job(lambda: self._judge(norms), device, events, is_urgent=False))

    def _judge(self, norms: Norms) -> Iterable[TableRow]:
        """In the worker."""
        entry = Entry.read(norms)
        self._keep(*self._black_box.add(entry), entry.step)
        return ()

    def _keep(self, why: Event | None, rows: list[Row], step: int) -> None:
        context = self._context
        if why is not None:
            context.schedule.demand(context.config.follow_steps)
            context.events.write(why, step)
        for row in rows:
            context.recorder.add(TABLE, row)


class NormTaps:
    """The hooks: `watch` at attach, `take` at each step boundary, in the training thread."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handles: list[Any] = []
        self._inside: int | None = None
        """The thread whose training forward is under way."""
        self._outputs: dict[str, tuple[torch.Tensor, int]] = {}
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def watch(self, roots: Sequence[nn.Module], left_alone: set[int]) -> None:
        """Put the hooks in; `left_alone` are ids of modules that must not be hooked."""
        self._parameters = list(_named_parameters(roots))
        for name, module in named_modules(list(roots)):
            if id(module) not in left_alone and not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._hook_of(name)))
        for root in roots:
            self._handles.append(root.register_forward_pre_hook(self._guard.hook("flight recorder", self._on_enter)))
            on_leave = self._guard.hook("flight recorder", self._on_leave)
            self._handles.append(root.register_forward_hook(on_leave, always_call=True))

    def remove(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            self._guard.attempt("removing hooks", handle.remove)

    def take(self, step: int) -> Norms:
        """The optimizer has stepped: return the norms of the step's outputs, and of the gradients that it used."""
        outputs, self._outputs, self._inside = self._outputs, {}, None
        gradients: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in self._parameters:
            gradient = _local(gradient_of(parameter))
            if gradient is not None and gradient.numel():
                gradients.setdefault(gradient.device, []).append((name, gradient))
        found_gradients = [self._gradient_norms(device, each) for device, each in gradients.items()]
        by_device: dict[torch.device, list[tuple[str, tuple[torch.Tensor, int]]]] = {}
        for item in outputs.items():
            by_device.setdefault(item[1][0].device, []).append(item)
        found_outputs: list[tuple[list[tuple[str, int]], torch.Tensor]] = []
        for device, items in by_device.items():
            with undisturbed(device.type):
                norms = torch.stack([norm for _, (norm, _) in items])
            found_outputs.append(([(name, n) for name, (_, n) in items], norms))
        ready = [(device, event_now(device)) for device in {*gradients, *by_device}]
        return Norms(step, time.time_ns(), found_outputs, found_gradients, ready)

    def _gradient_norms(
        self, device: torch.device, gradients: list[tuple[str, torch.Tensor]]
    ) -> tuple[list[tuple[str, int]], torch.Tensor]:
        with undisturbed(device.type):
            norms = _foreach_norm([g for _, g in gradients])
            return [(name, g.numel()) for name, g in gradients], torch.stack(norms)

    def _on_enter(self, root: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._inside = threading.get_ident()

    def _on_leave(self, root: nn.Module, args: Any, output: Any) -> None:
        self._inside = None

    def _hook_of(self, name: str) -> Hook:
        def on_call(module: nn.Module, args: Any, output: Any) -> None:
            self._take(name, output)

        return self._guard.hook(f"flight recorder at {name}", on_call, when=self._is_inside)

    def _is_inside(self) -> bool:
        return self._inside is not None and self._inside == threading.get_ident()

    def _take(self, name: str, output: Any) -> None:
        y: Any = output[0] if isinstance(output, (tuple, list)) and output else output
        if not (is_plain(y) and y.is_floating_point() and y.numel()) or is_off_limits(y):
            return
        with undisturbed(y.device.type):
            norm = torch.linalg.vector_norm(y.detach(), dtype=_norm_dtype(y)).to(torch.float32)
            held = self._outputs.get(name)
            if held is not None and held[0].device == norm.device:
                norm = torch.maximum(held[0], norm)  # which hands a NaN on
            self._outputs[name] = (norm, y.numel())


def _norm_dtype(x: torch.Tensor) -> torch.dtype:
    """What torch can take the norm in: it narrows nothing on the way."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _foreach_norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """float32 [] for each, one launch for those of a kind."""
    norms: dict[int, torch.Tensor] = {}
    for dtype in {_norm_dtype(x) for x in tensors}:
        at = [i for i, x in enumerate(tensors) if _norm_dtype(x) is dtype]
        found = norms_of([tensors[i] for i in at], dtype)
        norms.update((i, norm.to(torch.float32)) for i, norm in zip(at, found))
    return [norms[i] for i in range(len(tensors))]


def _named_parameters(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) below the roots, each once, under the name of the first module that owns it."""
    seen: set[int] = set()
    for module_name, module in named_modules(list(roots)):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{module_name}.{plain_name(name)}", parameter


def _local(gradient: Any) -> torch.Tensor | None:
    """A dense gradient as it is, a DTensor's shard on this rank, else None."""
    shard = local_shard(gradient)
    return shard if is_plain(shard) and shard.is_floating_point() else None
