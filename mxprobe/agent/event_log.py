"""What the agent tells in words: rows of table `events`."""

from __future__ import annotations

import time

from mxprobe.agent.clock import Clock
from mxprobe.agent.recorder import Recorder
from mxprobe.agent.worker import Worker


class EventLog:
    """`tell` and `tell_once` may be called from any thread; the rows are written by the worker's."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.worker: Worker | None = None
        """Set before anything is told: the worker needs a guard, which tells of errors here."""
        self._recorder = recorder
        self._clock = clock
        self._told: set[tuple[str, str]] = set()

    def tell(self, kind: str, detail: str) -> None:
        """Tell of what happened in the step under way."""
        step = self._clock.step
        if self.worker is not None:
            self.worker.put(lambda: self.write(kind, detail, step))

    def tell_once(self, kind: str, detail: str) -> None:
        """Tell of it, unless the same was told before."""
        if (kind, detail) not in self._told:
            self._told.add((kind, detail))
            self.tell(kind, detail)

    def write(self, kind: str, detail: str, step: int) -> None:
        """Add the row of an event of that step; part of a job."""
        row = {"step": self._recorder.step_base + step, "time_ns": time.time_ns(), "kind": kind, "detail": detail}
        self._recorder.add("events", row)
