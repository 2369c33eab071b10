"""The part around `mxprobe.agent.taps.signal_taps`: rows of table `signals`, under the step that was completed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.part import Job, Part
from mxprobe.agent.taps.signal_taps import NO_STEP, SignalTaps, any_sink


class Signals(Part):
    name = "signals"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._taps = SignalTaps(self._on_rows, context.guard.swallow, context.events.tell)

    def can_listen(self) -> bool:
        return any_sink()

    def listen(self) -> None:
        self._taps.ensure_wrapped()

    def watch(self, roots: Sequence[nn.Module]) -> None:
        self._taps.ensure_wrapped()

    def finish(self) -> Iterable[Job]:
        self._context.clock.hook_ns += self._taps.take_ns()
        self._taps.ensure_wrapped()
        return ()

    def remove(self) -> None:
        self._taps.unwrap()

    def _on_rows(self, rows: list[dict[str, Any]]) -> None:
        """In whatever thread logs. A call that named no step gets the one that this process had completed, if any."""
        run, worker = self._context.run, self._context.worker
        completed = run.n_steps if run.is_trainer else None
        worker.put_quietly(lambda: self._add(rows, completed))

    def _add(self, rows: list[dict[str, Any]], completed: int | None) -> None:
        recorder = self._context.recorder
        for row in rows:
            if row["step"] == NO_STEP and completed is not None:
                recorder.add("signals", {**row, "step": completed})
            else:
                recorder.add_absolute("signals", row)
