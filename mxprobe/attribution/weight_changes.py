"""Weights that were not the trainer's own while a phase computed with them, from the agent's events."""

import pandas as pd

from mxprobe.events import WEIGHT_NOISE, Event
from mxprobe.trace.event_facts import events_of


def weight_changes(events: pd.DataFrame, phase: str) -> dict[str, str]:
    """Return, by module (or `norms`), what was found of its weights in that phase, where it has not ended since."""
    last: dict[str, Event] = {}
    for _, event in events_of(events, WEIGHT_NOISE):
        if event.data["phase"] == phase:
            last[event.subject] = event
    return {name: event.said for name, event in last.items() if event.state != "own"}
