"""Both sides' log-probabilities of a step's tokens, from wherever they can be had: the model, the training batch.

The model's own calls where generation runs in this process (`rollouts`), the batch where a framework holds both
sides (`batch`). `watch` at attach, `arm` before a probed step, `finish` after it, in the training thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.parts.batches import BatchTaps
from mxprobe.agent.parts.rollouts import Measurement, RolloutTap
from mxprobe.events import Tell
from mxprobe.measuring.tokens.batch import BatchMeasurement
from mxprobe.schema import TableRow


class Measurements:
    """One or two; `rows` waits for the device and belongs to the worker."""

    def __init__(self, parts: list[Measurement | BatchMeasurement]) -> None:
        self._parts = parts
        self.device = parts[0].device
        self.ready = parts[-1].ready

    def rows(self, tell: Tell) -> list[TableRow]:
        return [row for part in self._parts for row in part.rows(tell)]


class TokenTaps:
    def __init__(self, clock: Clock, guard: Guard, tell: Tell) -> None:
        self._rollouts = RolloutTap(clock, guard, tell)
        self._batches = BatchTaps(clock, guard, tell, self._rollouts.note_batch)
        self.tell = self._rollouts.tell

    def watch(self, roots: Sequence[nn.Module]) -> list[Any]:
        """Handles, each with a `remove`: the model's hooks, and the functions that were wrapped."""
        self._batches.ensure_wrapped()
        return [*self._rollouts.watch(roots), self]

    def remove(self) -> None:
        self._batches.unwrap()

    def arm(self) -> None:
        self._batches.ensure_wrapped()
        self._batches.arm()
        self._rollouts.arm()

    def finish(self) -> Measurements | None:
        """What the step that is over has given; None if nothing."""
        found = (self._rollouts.finish(), self._batches.finish(self._rollouts.computed_in))
        parts = [part for part in found if part is not None]
        return Measurements(parts) if parts else None
