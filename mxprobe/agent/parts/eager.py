"""Probed steps of a compiled model, run eagerly: the only way for a hook on one of its modules to be called. Opt-in.

A fused kernel rounds elsewhere than the operations it replaces, so that a probed step is then not bit for bit what it
would have been, and the run from there on neither. What was compiled is kept and used again by the next step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.part import Job, Part
from mxprobe.events import Event, Tell
from mxprobe.measuring.adapters.weight_modules import is_compiled

EVENT = "eager"
NOT_BIT_EXACT = "probed steps run the compiled model eagerly: the run is not bit for bit what it is without mxprobe"
_OLD = "a torch older than 2.6 cannot run a compiled model eagerly for a step: its modules stay unseen"


class EagerSteps(Part):
    """The step that is watched to find the model is run eagerly too: a model compiled in place (`module.compile()`)
    calls no global hook either.
    """

    name = "eager steps"

    def __init__(self, wanted: bool, clock: Clock, guard: Guard, tell: Tell) -> None:
        self.is_on = False
        """Probed steps are run eagerly, since there is something compiled."""
        self._wanted = wanted
        self._clock = clock
        self._guard = guard
        self._tell = tell
        self._stance: Any = None

    def observe(self) -> None:
        self.is_on = self._wanted and "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
        self.enter()

    def listen(self) -> None:
        self.remove()

    def watch(self, roots: Sequence[nn.Module]) -> None:
        self.remove()
        any_compiled = any(is_compiled(module) for root in roots for module in root.modules())
        self.is_on = self._wanted and any_compiled and hasattr(torch.compiler, "set_stance")
        if self._wanted and any_compiled:
            told = ("on", NOT_BIT_EXACT) if self.is_on else ("off", _OLD)
            self._tell(Event(EVENT, "", told[0], text=told[1]))

    def begin(self) -> None:
        if self._clock.probed:
            self._clock.is_slower = self.is_on
            self.enter()

    def finish(self) -> Iterable[Job]:
        self.remove()
        return ()

    def status(self) -> dict[str, Any]:
        return {"eager_probe_steps": self.is_on}

    def enter(self) -> None:
        """Run the steps to come eagerly."""
        if not self.is_on or self._stance is not None or torch.compiler.is_compiling():
            return
        try:
            self._stance = torch.compiler.set_stance("force_eager")
        except Exception as error:
            self._guard.swallow("running a step eagerly", error)

    def remove(self) -> None:
        stance, self._stance = self._stance, None
        if stance is None:
            return
        try:
            stance.__exit__(None, None, None)
        except Exception as error:
            self._guard.swallow("compiled steps again", error)
