"""What a session tells of: rows for the trace, frames for the controller. Written by the worker's thread alone.

Methods called `on_...` are called by the parts of a session, from any thread, and hand over to the worker; the others
are jobs of its, or parts of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.parts.replays import Rows
from mxprobe.agent.parts.signals import NO_STEP
from mxprobe.agent.parts.sync import Held
from mxprobe.agent.parts.tokens import Measurements
from mxprobe.agent.recorder import Recorder
from mxprobe.agent.schedule import Schedule
from mxprobe.agent.transport import Transport
from mxprobe.agent.worker import Worker
from mxprobe.events import Event, Tell
from mxprobe.measuring import black_box
from mxprobe.measuring.black_box import Norms
from mxprobe.measuring.versions.weight_noise import NormWeights
from mxprobe.protocol import AgentConfig
from mxprobe.schema import WEIGHT_CODES


class Ledger:
    """Rows and frames of one attach. `guard` and `worker` need it and are given to it before anything is told."""

    guard: Guard
    worker: Worker

    def __init__(
        self,
        config: AgentConfig,
        transport: Transport,
        clock: Clock,
        schedule: Schedule,
        module_rows: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        self.total_measure_ns = 0
        self.recorder = Recorder(transport)
        self._follow_steps = config.follow_steps
        self._transport = transport
        self._clock = clock
        self._schedule = schedule
        self._module_rows = module_rows
        self._black_box = black_box.BlackBox(config.follow_steps)
        self._inventoried = False

    def announce(
        self, *, roots: list[str], role: str, n_modules: int, recipes: list[str], kernels_ms: float | None = None
    ) -> None:
        """Once the step count is known, and kernels are compiled, which has taken `kernels_ms` where there are any."""
        what = f"{', '.join(roots)}; {n_modules} modules" if roots else "no model runs here, its signals alone"
        facts = {"roots": roots, "n_modules": n_modules}
        self.event(Event("attached", role, "", facts, f"{role}: {what}"), 0)
        self._add_modules()
        self.recorder.flush()
        self._transport.control(
            {
                "verb": "attached",
                "roots": roots,
                "modules": n_modules,
                "role": role,
                "step": self.worker.step_base,
                "recipes": recipes,
                "kernels_ms": kernels_ms,
            }
        )

    def farewell(self, reason: str, step: int) -> None:
        self._add_modules()
        self.event(Event("detached", "", reason, text=reason), step)
        self.recorder.flush()

    def event(self, event: Event, step: int) -> None:
        self.recorder.add("events", event.at({"step": step, "time_ns": time.time_ns()}))

    def record_step(self, step: int, ended_ns: int, *, probed: bool, step_ns: int, hook_ns: int) -> None:
        measure_ns = self.worker.measure()
        self.total_measure_ns += measure_ns
        self.recorder.add(
            "overhead",
            {
                "step": step,
                "time_ns": ended_ns,
                "probed": probed,
                "step_ns": step_ns,
                "probe_ns": hook_ns,
                "measure_ns": measure_ns,
                "n_dropped": self._transport.n_dropped_rows,
                "n_errors": self.guard.n_errors,
                "sent_bytes": self._transport.sent_bytes,
            },
        )
        if probed:
            if not self._inventoried:
                self._inventoried = True
                self._add_modules()
            self.recorder.flush()

    def record_replay(self, rows: Rows) -> None:
        for table, row in rows():
            self.recorder.add(table, row)

    def record_rollouts(self, measured: Measurements, tell: Tell) -> None:
        def record() -> None:
            for table, row in measured.rows(tell):
                self.recorder.add(table, row)

        self.worker.aside(measured.device, [measured.ready], record)

    def record_held(self, held: Held, step: int) -> None:
        def record() -> None:
            for row in held.rows(step):
                self.recorder.add(WEIGHT_CODES, row)

        self.worker.aside(held.device, [held.ready], record)

    def record_norms(self, weights: NormWeights, step: int) -> None:
        def record() -> None:
            for event in self.worker.norm_changes(weights):
                self.event(event, step)

        self.worker.aside(weights.device, [weights.ready], record)

    def trigger(self, reason: str, n_steps: int) -> None:
        """Keep what the flight recorder holds, and go to full statistics."""
        self._keep(*self._black_box.trigger(reason), n_steps)

    def on_norms(self, norms: Norms) -> None:
        self.worker.put_quietly(lambda: self._keep_norms(norms))

    def on_signals(self, rows: list[dict[str, Any]], completed: int | None) -> None:
        """Where a call named no step, it is the one that this process had completed, if it takes steps."""
        self.worker.put_quietly(lambda: self._add_signals(rows, completed))

    def on_event(self, event: Event) -> None:
        step = self._clock.step
        try:
            self.worker.put(lambda: self.event(event, step))
        except Exception as error:  # the parts tell of what has failed: this is the last that may not
            self.guard.swallow("telling of an event", error)

    def on_error(self, where: str, detail: str) -> None:
        step = self._clock.step
        event = Event("error", where, text=f"{where}: {detail}")
        self.worker.put(lambda: self.event(event, step))

    def on_switch_answer(self, answer: dict[str, Any]) -> None:
        def tell() -> None:
            self.recorder.flush()
            self._transport.control({"verb": "set", **answer})

        self.worker.put(tell)

    def _keep_norms(self, norms: Norms) -> None:
        def keep() -> None:
            entry = black_box.Entry.read(norms)
            self._keep(*self._black_box.add(entry), entry.step)

        if norms.ready:
            self.worker.aside(norms.ready[0][0], [event for _, event in norms.ready], keep)

    def _keep(self, why: Event | None, rows: list[dict[str, Any]], step: int) -> None:
        if why is not None:
            self._schedule.demand(self._follow_steps)
            self.event(why, step)
        for row in rows:
            self.recorder.add(black_box.TABLE, row)

    def _add_modules(self) -> None:
        for row in self._module_rows():
            self.recorder.add("modules", row)

    def _add_signals(self, rows: list[dict[str, Any]], completed: int | None) -> None:
        for row in rows:
            if row["step"] == NO_STEP and completed is not None:
                self.recorder.add("signals", {**row, "step": completed})
            else:
                self.recorder.add_absolute("signals", row)
