"""Probed steps of a compiled model, run eagerly: the only way for a hook on one of its modules to be called. Opt-in.

A fused kernel rounds elsewhere than the operations it replaces, so that a probed step is then not bit for bit what it
would have been, and the run from there on neither. What was compiled is kept and used again by the next step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mxprobe.agent.guard import Guard
from mxprobe.events import Event, Tell

EVENT = "eager"
NOT_BIT_EXACT = "probed steps run the compiled model eagerly: the run is not bit for bit what it is without mxprobe"
_OLD = "a torch older than 2.6 cannot run a compiled model eagerly for a step: its modules stay unseen"


class EagerSteps:
    """`enter` before a probed step and `leave` after it, in the training thread; `leave` also when the hooks go.

    The step that is watched to find the model is one too: a model compiled in place (`module.compile()`) calls no
    global hook either.
    """

    def __init__(self, wanted: bool, guard: Guard, tell: Tell) -> None:
        self.is_on = False
        """Probed steps are run eagerly, since there is something compiled."""
        self._wanted = wanted
        self._guard = guard
        self._tell = tell
        self._stance: Any = None

    def watch(self) -> None:
        """Until the model is known, or nothing more is waited for."""
        self.is_on = self._wanted and "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
        self.enter()

    def look(self, any_compiled: bool) -> None:
        """The model is known."""
        self.leave()
        self.is_on = self._wanted and any_compiled and hasattr(torch.compiler, "set_stance")
        if self._wanted and any_compiled:
            told = ("on", NOT_BIT_EXACT) if self.is_on else ("off", _OLD)
            self._tell(Event(EVENT, "", told[0], text=told[1]))

    def enter(self) -> None:
        """The steps to come are eager."""
        if not self.is_on or self._stance is not None or torch.compiler.is_compiling():
            return
        try:
            self._stance = torch.compiler.set_stance("force_eager")
        except Exception as error:
            self._guard.swallow("running a step eagerly", error)

    def leave(self) -> None:
        """The stance is again what it was."""
        stance, self._stance = self._stance, None
        if stance is None:
            return
        try:
            stance.__exit__(None, None, None)
        except Exception as error:
            self._guard.swallow("compiled steps again", error)
