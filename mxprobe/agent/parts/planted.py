"""Calls inside graphs of torch.compile, where no module hook fires: told by operators that `mxprobe run` planted there.

They were planted before the model was compiled (`mxprobe/attach/startup/planting.py`) and know nothing of modules: a
call is told from the others by the address of its weight. Its output is seen too, but not in a checkpointed region,
where it would be computed once more for that. A module that the compiler left out calls its hook: both are listened to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.part import Job, Part
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.events import Event, Tell
from mxprobe.measuring.adapters.adapter import Reading, held
from mxprobe.measuring.compat import in_backward, is_checkpointed
from mxprobe.measuring.isolation import is_off_limits, is_plain

PLANTING = "_mxprobe_planting"
"""The module that holds the operators, where they are."""
EVENT = "planted"
NOT_BIT_EXACT = "operators are planted in what torch.compile makes: the run is not bit for bit what it is without them"
NOTE = "planted: seen by an operator in the compiled graph"
CHECKPOINTED = f"{NOTE}, which does not show the output of a checkpointed region"

Receive = Callable[[torch.Tensor], None]


class PlantedOps(Part):
    """`on_operands(x, w, y, ticket)` and `on_gradient(g, ticket)` are called by the operators, in the threads that run
    the graphs.
    """

    name = "planted operators"

    def __init__(
        self,
        clock: Clock,
        guard: Guard,
        tell: Tell,
        probes: Callable[[], Iterable[ModuleProbe]],
    ) -> None:
        self.is_on = False
        """Operators are listened to in probed steps."""
        self._clock = clock
        self._tell = tell
        self._all_probes = probes
        self._planting = sys.modules.get(PLANTING)
        self._probes: list[ModuleProbe] = []
        self._by_address: dict[int, ModuleProbe] = {}
        self._waiting: dict[int, tuple[torch.Tensor, Receive]] = {}
        """Address of a ticket -> the ticket, which must not be freed while it is waited for, and what takes G."""
        self.on_operands = guard.hook("planted operator", self._on_operands)
        self.on_gradient = guard.hook("planted operator's gradient", self._on_gradient)

    def watch(self, roots: Sequence[nn.Module]) -> None:
        """Listen for modules whose class computes as `nn.Linear` does, where anything can have been compiled."""
        if self._planting is None or "torch._dynamo" not in sys.modules:
            return
        self._probes = [p for p in self._all_probes() if p.trains and type(p.module).forward is nn.Linear.forward]
        self.is_on = bool(self._probes)
        if self.is_on:
            self._tell(Event(EVENT, "", "on", text=NOT_BIT_EXACT))

    def begin(self) -> None:
        if self._clock.probed and self.is_on and self._planting is not None:
            self._by_address = _addresses(self._probes)
            self._planting.__dict__["observer"] = self

    def finish(self) -> Iterable[Job]:
        self.remove()
        return ()

    def remove(self) -> None:
        if self._planting is not None and self._planting.__dict__.get("observer") is self:
            self._planting.__dict__["observer"] = None
        self._waiting = {}

    def status(self) -> dict[str, Any]:
        return {"planted_probes": self.is_on}

    def _on_gradient(self, g: torch.Tensor, ticket: torch.Tensor) -> None:
        _, receive = self._waiting.pop(ticket.data_ptr(), (None, None))
        if receive is not None:
            receive(g)

    def _on_operands(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor | None, ticket: torch.Tensor) -> None:
        if _comes_again():
            return
        probe = self._probe_of(w)
        if probe is None or not probe.armed or not x.numel() or is_off_limits(x):
            return
        note = CHECKPOINTED if y is None else NOTE
        reading = Reading(x, None, y, withheld=note, on_gradient=partial(self._await, ticket))
        probe.on_training_call(reading, is_repetition=False)

    def _await(self, ticket: torch.Tensor, receive: Receive) -> None:
        self._waiting[ticket.data_ptr()] = (ticket, receive)

    def _probe_of(self, w: torch.Tensor) -> ModuleProbe | None:
        """None for a weight of no probed module, or of several. FSDP moves weights about within a step."""
        address = w.data_ptr()
        probe = self._by_address.get(address)
        if probe is None or _address(probe) != address:
            self._by_address = _addresses(self._probes)
            probe = self._by_address.get(address)
        return probe


def _comes_again() -> bool:
    """Whether the graph runs in a region that is checkpointed around it: G will carry the ticket of the second run."""
    return not in_backward() and is_checkpointed()


def _addresses(probes: list[ModuleProbe]) -> dict[int, ModuleProbe]:
    found: dict[int, ModuleProbe] = {}
    shared: set[int] = {0}
    for probe in probes:
        address = _address(probe)
        if address in found:
            shared.add(address)
        found[address] = probe
    return {address: probe for address, probe in found.items() if address not in shared}


def _address(probe: ModuleProbe) -> int:
    """Of the module's weight; 0 where it has no memory of its own."""
    weight: Any = held(probe.module, "weight")
    return weight.data_ptr() if is_plain(weight) else 0
