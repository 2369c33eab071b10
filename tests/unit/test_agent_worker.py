"""What the measuring thread still does when it has to leave."""

from __future__ import annotations

import threading
from typing import Any, cast

from mxprobe.agent.guard import Guard
from mxprobe.agent.recorder import Recorder
from mxprobe.agent.transport import Transport
from mxprobe.agent.worker import Worker
from mxprobe.events import Event


class Kept:
    """Stands where the transport does: keeps the batches."""

    def __init__(self) -> None:
        self.rows = 0

    def batch(self, table: str, columns: dict[str, list[Any]]) -> bool:
        self.rows += len(columns["step"])
        return True


def test_jobs_behind_a_long_one_are_done_when_it_has_to_stop() -> None:
    """A detach that comes while a large model is measured must not lose what was recorded of the steps meanwhile."""
    kept = Kept()
    recorder = Recorder(cast(Transport, kept))
    errors: list[str] = []
    worker = Worker(recorder, Guard(5, lambda where, detail: errors.append(detail), lambda: None))
    worker.start()
    begun, go = threading.Event(), threading.Event()

    def long_job() -> None:
        begun.set()
        assert go.wait(60)

    worker.put(long_job)
    assert begun.wait(60)
    for step in range(3):
        row = Event("test").at({"step": step, "time_ns": 0})
        worker.put_quietly(lambda row=row: recorder.add("events", row))
    assert not worker.drain(0.0)
    threading.Timer(0.1, go.set).start()
    worker.stop(60)
    assert (kept.rows, errors, worker.n_abandoned) == (3, [], 0)
