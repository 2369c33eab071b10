"""The parts of a session, called one after the other: where one fails, the others go on without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Callable

from mxprobe.agent.guard import Guard
from mxprobe.agent.part import Job, Part
from mxprobe.schema import TableRow


class PartList:
    def __init__(self, parts: Iterable[Part], guard: Guard) -> None:
        self._parts = list(parts)
        self._guard = guard

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def keep_for(self, role: str) -> None:
        """Forget the parts that are not for a process of that role."""
        self._parts = [part for part in self._parts if role in part.roles]

    def each(self, act: Callable[[Part], object]) -> None:
        for part in self._parts:
            self._guard.attempt(part.name, lambda part=part: act(part))

    @property
    def is_busy(self) -> bool:
        """No step is to be probed yet."""
        return any(part.is_busy for part in self._parts)

    def can_listen(self) -> bool:
        """Whether there is something to measure in a process that runs no model."""
        return any(self._guard.attempt(part.name, part.can_listen, False) for part in self._parts)

    def finish(self) -> Iterator[Job]:
        """Finish a step; yields the jobs of each part before the next one finishes."""
        for part in self._parts:
            yield from self._guard.attempt(part.name, part.finish, ())

    def rows(self) -> list[TableRow]:
        """Return the rows on the model as a whole."""
        found: list[TableRow] = []
        self.each(lambda part: found.extend(part.rows()))
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.each(lambda part: found.update(part.status()))
        return found
