"""The memory that we take of the run's device: looked at after probed steps, told of at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mxprobe.agent.context import Context
from mxprobe.agent.part import Job, Part
from mxprobe.events import Event
from mxprobe.schema import TableRow


class MemoryInUse(Part):
    name = "memory"

    def __init__(self, context: Context) -> None:
        self._context = context

    def finish(self) -> Iterable[Job]:
        return [Job(self._look)] if self._context.clock.probed else ()

    def _look(self) -> Iterable[TableRow]:
        """In the worker."""
        memory = self._context.memory
        memory.look(self._context.worker.stream_of(memory.where))
        return ()

    def remove(self) -> None:
        if self._context.run.root_names:
            self._context.events.tell(Event("memory", "", "in_use", text=self._context.memory.words()))

    def status(self) -> dict[str, Any]:
        memory = self._context.memory
        return {
            "memory": memory.words(),
            "memory_peak_bytes": memory.peak_bytes,
            "memory_limit_bytes": memory.limit,
        }
