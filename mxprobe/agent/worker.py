"""The thread that measures: takes snapshots and small jobs in order, and never makes the training thread wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Callable

import torch

from mxprobe.agent.guard import Guard
from mxprobe.agent.recorder import Recorder
from mxprobe.events import Event
from mxprobe.measuring.engines.fingerprints import trainer_rows
from mxprobe.measuring.moe.behaviour import OutputState
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.operands.bare_weights import WeightsSnapshot
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.recipes import Recipe
from mxprobe.measuring.sampling import spread
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.updates import update_row
from mxprobe.measuring.versions.weight_history import RECENT, Copies, Version, WeightHistory
from mxprobe.measuring.versions.weight_noise import NormWeights
from mxprobe.protocol import AgentConfig
from mxprobe.schema import WEIGHT_CODES, Phase

Job = Callable[[], None]

FLUSH_EVERY_S = 0.5
_EVENT_POLL_S = 0.001
_PLACE = ("phase", "role", "expert", "recipe")
"""Data of an event that say what it is about, beside its subject."""
UPDATES_EVERY = RECENT + 1
"""Steps between two rows of table `updates`: once in a group of versions."""


class Worker:
    """Jobs in order of arrival. `submit`, `put` and `put_quietly` may be called from any thread and do not block."""

    def __init__(self, config: AgentConfig, recorder: Recorder, guard: Guard) -> None:
        self.n_abandoned = 0
        """Snapshots given up because the agent had to leave."""
        self._config = config
        self._recorder = recorder
        self._guard = guard
        self._jobs: deque[Job] = deque()
        self._busy = False
        self._changed = threading.Condition()
        self._n_snapshots = 0
        self._held: list[Snapshot | ExpertsSnapshot | WeightsSnapshot] = []
        self._stopping = False
        self._found: set[tuple[Any, ...]] = set()
        self._recipes: dict[tuple[str, str], Recipe] = {}
        self._history = WeightHistory()
        self._generates = False
        self._experts = OutputState()
        self._updates_due: dict[str, int] = {}
        self._streams: dict[torch.device, Any] = {}
        self._last_flush = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mxprobe-worker", daemon=True)
        self._thread.start()

    @property
    def step_base(self) -> int:
        """Optimizer steps completed before attach; written by a job that comes first."""
        return self._recorder.step_base

    @step_base.setter
    def step_base(self, n_steps: int) -> None:
        self._recorder.step_base = n_steps

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def put_quietly(self, job: Job) -> None:
        """For jobs of every step: done within FLUSH_EVERY_S. Waking a thread may cost the caller its turn."""
        self._jobs.append(job)

    def submit(self, snapshot: Snapshot | ExpertsSnapshot | WeightsSnapshot) -> None:
        """Hand over a snapshot; it is measured with the others of its step, by `measure`."""
        with self._changed:
            self._n_snapshots += 1
            self._jobs.append(lambda: self._held.append(snapshot))
            self._changed.notify_all()

    @property
    def backlog(self) -> int:
        """Snapshots not yet measured."""
        return self._n_snapshots

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. What it does is guarded; it ends by `stop` alone, or by what no guard can hold."""
        return self._thread.is_alive()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is done; False after the timeout."""
        with self._changed:
            self._changed.notify_all()
            if not self.is_alive:
                return False
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End the thread after the operand it is at; snapshots that are left are counted as abandoned."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with torch.no_grad():
            while not self._stopping:
                job = self._next_job()
                if job is not None:
                    self._do(job)
                self._flush_if_due()
            while self._jobs:  # nothing more is measured; what there is to tell of the steps is told
                self._do(self._jobs.popleft())
        self.n_abandoned += self._n_snapshots
        self._flush()

    def _next_job(self) -> Job | None:
        with self._changed:
            self._busy = False
            if not self._jobs:
                self._changed.notify_all()
                self._changed.wait(FLUSH_EVERY_S)
            if self._stopping or not self._jobs:
                return None
            self._busy = True
            return self._jobs.popleft()

    def _do(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._guard.swallow("measuring", error)

    def _flush_if_due(self) -> None:
        if time.monotonic() - self._last_flush > FLUSH_EVERY_S:
            self._flush()

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        self._do(self._recorder.flush)

    def measure(self) -> int:
        """Measure the snapshots handed over since the last call; returns the ns it took. A job's business."""
        if self._stopping:
            return 0
        started = time.perf_counter_ns()
        held, self._held = self._held, []
        try:
            if held and held[0].x.is_cuda:
                self._measure_on_own_stream(held)
            elif held:
                self._measure_here(held)
        finally:
            with self._changed:
                self._n_snapshots -= len(held)
        return time.perf_counter_ns() - started

    def _measure_on_own_stream(self, snapshots: list[Snapshot | ExpertsSnapshot | WeightsSnapshot]) -> None:
        """Wait for the copies by polling, then compute beside the run's stream; only this thread waits for it."""
        by_device: dict[torch.device, list[Snapshot | ExpertsSnapshot | WeightsSnapshot]] = {}
        for snapshot in snapshots:
            by_device.setdefault(snapshot.x.device, []).append(snapshot)
        for device, here in by_device.items():
            self.aside(device, [snapshot.ready for snapshot in here], lambda here=here: self._measure_here(here))

    def aside(self, device: torch.device, ready: list[Any], work: Job) -> None:
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
        """On which this thread computes there; None where it has not yet, and on a CPU."""
        return self._streams.get(device)

    def keep_versions(self, copies: list[Copies]) -> None:
        """Add the weights of a step to the history; a job."""
        for each in copies:
            self.aside(each.device, [each.ready], lambda each=each: self._keep(each))

    def norm_changes(self, weights: NormWeights) -> list[Event]:
        """Return the events that the norms of a step give; part of a job, once the copies are complete."""
        told = (self._history.noise.of_norms(phase, found) for phase, found in weights.changes().items())
        return [event for event in told if event is not None]

    def _keep(self, copies: Copies) -> None:
        self._history.keep(copies)
        for name, version in copies.versions.items():
            self._hash(name, version, copies.out_features.get(name, 0))
            newest = self._history.newest(name)
            due = self._updates_due.get(name, 0) <= version.step
            if len(newest) == 3 and due and not self._stopping:
                self._updates_due[name] = version.step + UPDATES_EVERY
                self._recorder.add("updates", self._update(name, *newest))
        for stack in copies.stacks:
            if not self._generates and not self._stopping:
                for row in stack.table_rows():
                    self._recorder.add(WEIGHT_CODES, row)

    def _hash(self, name: str, version: Version, out_features: int) -> None:
        """For engines elsewhere; a process that generates is asked by its outputs, see `WeightHistory`."""
        if not out_features or self._generates or self._stopping:
            return
        index = spread(len(version.weight), out_features)
        for row in trainer_rows(name, version.weight, index, out_features, step=version.step):
            self._recorder.add(WEIGHT_CODES, row)

    def _update(self, name: str, earlier: Version, before: Version, now: Version) -> dict[str, Any]:
        values = update_row(earlier.weight, before.weight, now.weight, rule=self._config.rule)
        steps = {"step": now.step, "from_step": before.step}
        how = {"module": name, "format": "mxfp4", "rule": self._config.rule}
        return {**steps, "time_ns": time.time_ns(), **how, **values}

    def _measure_here(self, snapshots: list[Snapshot | ExpertsSnapshot | WeightsSnapshot]) -> None:
        self._generates = self._generates or any(each.phase == Phase.ROLLOUT.value for each in snapshots)
        rows = measure_step(
            snapshots,
            self._config,
            recipes=self._recipes,
            history=self._history,
            experts=self._experts,
            swallow=self._guard.swallow,
        )
        for table, row in rows:
            if table != "events" or self._is_first(row):
                self._recorder.add(table, row)
            self._flush_if_due()
            if self._stopping:
                self.n_abandoned += len(snapshots)
                return

    def _is_first(self, event: dict[str, Any]) -> bool:
        """Whether a finding is new, by kind, state and place: a run that went NaN would tell it at every step."""
        told: Event = event["event"]
        finding = (told.kind, told.subject, told.state, *(told.data.get(name) for name in _PLACE))
        new = finding not in self._found
        self._found.add(finding)
        return new
