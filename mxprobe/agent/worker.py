"""The thread that measures: does jobs in order, and never makes the training thread wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable

import torch

from mxprobe.agent.guard import Guard
from mxprobe.agent.part import Job
from mxprobe.agent.recorder import Recorder

Act = Callable[[], None]

FLUSH_EVERY_S = 0.5
_EVENT_POLL_S = 0.001


class Worker:
    """Jobs in order of arrival. `hand_over`, `put` and `put_quietly` may be called from any thread and do not block."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self.n_abandoned = 0
        """Calls that were copied and not measured, because the agent had to leave."""
        self.backlog = 0
        """Calls that were handed over and are not measured yet."""
        self.measure_ns = 0
        """Time spent on measuring, in all."""
        self._accounted_ns = 0
        self._recorder = recorder
        self._guard = guard
        self._jobs: deque[Act] = deque()
        self._busy = False
        self._changed = threading.Condition()
        self._stopping = False
        self._streams: dict[torch.device, Any] = {}
        self._last_flush = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mxprobe-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, act: Act) -> None:
        """Add something to do, and wake the thread."""
        with self._changed:
            self._jobs.append(act)
            self._changed.notify_all()

    def put_quietly(self, act: Act) -> None:
        """Add something of every step: it is done within FLUSH_EVERY_S."""
        self._jobs.append(act)

    def hand_over(self, job: Job, done: Act | None = None) -> None:
        """Add a job; `done` is called once it is over, or has failed."""
        with self._changed:
            self.backlog += job.n_snapshots

        def act() -> None:
            try:
                self._work(job)
            finally:
                with self._changed:
                    self.backlog -= job.n_snapshots
                if done is not None:
                    done()

        (self.put if job.is_urgent else self.put_quietly)(act)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. What it does is guarded; it ends by `stop` alone, or by what no guard can hold."""
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Nothing more is measured; what there is to tell is told."""
        return self._stopping

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is done; False after the timeout."""
        with self._changed:
            self._changed.notify_all()
            if not self.is_alive:
                return False
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End the thread after the operand it is at; calls that are left are counted as abandoned."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with torch.no_grad():
            while not self._stopping:
                act = self._next_job()
                if act is not None:
                    self._do(act)
                self._flush_if_due()
            while self._jobs:
                self._do(self._jobs.popleft())
        self._flush()

    def _next_job(self) -> Act | None:
        with self._changed:
            self._busy = False
            if not self._jobs:
                self._changed.notify_all()
                self._changed.wait(FLUSH_EVERY_S)
            if self._stopping or not self._jobs:
                return None
            self._busy = True
            return self._jobs.popleft()

    def _do(self, act: Act) -> None:
        self._guard.attempt("measuring", act)

    def _flush_if_due(self) -> None:
        if time.monotonic() - self._last_flush > FLUSH_EVERY_S:
            self._flush()

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        self._do(self._recorder.flush)

    def _work(self, job: Job) -> None:
        if not job.n_snapshots:
            self.aside(job.device, job.ready, lambda: self._write(job))
        elif self._stopping:
            self.n_abandoned += job.n_snapshots
        else:
            started = time.perf_counter_ns()
            try:
                self.aside(job.device, job.ready, lambda: self._write(job))
            finally:
                self.measure_ns += time.perf_counter_ns() - started

    def _write(self, job: Job) -> None:
        for table, row in job.rows():
            self._recorder.add(table, row)
            if job.n_snapshots:
                self._flush_if_due()
                if self._stopping:
                    self.n_abandoned += job.n_snapshots
                    return
        if job.flush:
            self._recorder.flush()

    def take_measure_ns(self) -> int:
        """Return the time spent on measuring since the last call; part of a job."""
        spent, self._accounted_ns = self.measure_ns - self._accounted_ns, self.measure_ns
        return spent

    def aside(self, device: torch.device, ready: Sequence[Any], work: Act) -> None:
        """Part of a job: do `work` once the device is past the events, on a stream of our own; on a CPU, at once."""
        while not all(event is None or event.query() for event in ready):
            time.sleep(_EVENT_POLL_S)
        if device.type != "cuda":
            work()
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()  # before the copies are freed for the run's stream to reuse

    def stream_of(self, device: torch.device) -> Any:
        """Return the stream on which this thread computes there; None where it has not yet, and on a CPU."""
        return self._streams.get(device)
