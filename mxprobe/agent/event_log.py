"""What the agent tells of: rows of table `events`."""

from __future__ import annotations

import time

from mxprobe.agent.clock import Clock
from mxprobe.agent.recorder import Recorder
from mxprobe.agent.worker import Worker
from mxprobe.events import Event


class EventLog:
    """`tell` and `tell_once` may be called from any thread; the rows are written by the worker's."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.worker: Worker | None = None
        """Set before anything is told: the worker needs a guard, which tells of errors here."""
        self._recorder = recorder
        self._clock = clock
        self._told: list[Event] = []

    def tell(self, event: Event) -> None:
        """Tell of what happened in the step under way."""
        step = self._clock.step
        if self.worker is not None:
            self.worker.put(lambda: self.write(event, step))

    def tell_once(self, event: Event) -> None:
        """Tell of it, unless the same was told before."""
        if event not in self._told:
            self._told.append(event)
            self.tell(event)

    def write(self, event: Event, step: int) -> None:
        """Add the row of an event of that step; part of a job."""
        self._recorder.add("events", event.at({"step": step, "time_ns": time.time_ns()}))
