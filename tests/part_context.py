"""The context of a part outside a session: events and errors are kept as they are told, and no thread runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from mxprobe.agent.context import Context
from mxprobe.agent.event_log import EventLog
from mxprobe.agent.guard import Guard
from mxprobe.events import Event
from mxprobe.protocol import AgentConfig


class Events(EventLog):
    def __init__(self, context: Context) -> None:
        super().__init__(context.recorder, context.clock)
        self.told: list[Event] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)


@dataclass
class Told:
    context: Context
    errors: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        events: Any = self.context.events
        return events.told

    @property
    def details(self) -> list[str]:
        return [event.words for event in self.events]


def told(config: AgentConfig | None = None, **others: Any) -> Told:
    """A context with other members where they are named, and what is told in it."""
    transport: Any = SimpleNamespace(batch=lambda *_: True, n_dropped_rows=0, sent_bytes=0)
    made = Context.make(config or AgentConfig(), transport, lambda: None)
    errors: list[str] = []
    guard = Guard(10**9, lambda where, detail: errors.append(f"{where}: {detail}"), lambda: None, made.clock)
    return Told(replace(made, guard=guard, events=Events(made), **others), errors)
