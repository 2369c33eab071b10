"""The flight recorder's memory: the norms of the last steps, and what makes them worth keeping.

Kept in a ring of `PAST_STEPS`. Written to table `flight` once a trigger falls, with the steps that follow:

    nonfinite  a norm is NaN or infinite, for the first time after a step without
    spike      the norm of the whole gradient is over SPIKE_FACTOR times its median in the ring
    asked      by `mxprobe trigger`, or by the controller, who saw the mismatch jump

The first bad module is the first in order of execution: of the forward pass where an output is bad, else of the
backward pass. Belongs to one thread.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch

from mxprobe.events import Event
from mxprobe.schema import Row

EVENT = "flight"
TABLE = "flight"
PAST_STEPS = 64
MIN_PAST = 16
"""Steps of which a median is taken before anything can be called a spike."""
SPIKE_FACTOR = 10.0
MAX_DUMPS = 16
"""Triggers that write rows; later ones are told and nothing more."""


@dataclass(frozen=True)
class Entry:
    """The norms of one step: name -> (norm, elements), outputs in order of execution."""

    step: int
    time_ns: int
    outputs: dict[str, tuple[float, int]]
    gradients: dict[str, tuple[float, int]]

    @classmethod
    def read(cls, norms: Norms) -> Entry:
        """Read the norms off their devices: waits for them."""
        outputs, gradients = (
            {name: (norm, n) for named, values in parts for (name, n), norm in zip(named, values.tolist())}
            for parts in (norms.outputs, norms.gradients)
        )
        return cls(norms.step, norms.time_ns, outputs, gradients)

    @cached_property
    def gradient_norm(self) -> float:
        return math.sqrt(sum(norm * norm for norm, _ in self.gradients.values()))

    def owner(self, parameter: str) -> str:
        return parameter.rpartition(".")[0]

    def positions(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.outputs)}

    def rows(self) -> list[Row]:
        when = {"step": self.step, "time_ns": self.time_ns}
        at = self.positions()
        rows = [
            {**when, "kind": "output", "name": name, "position": at[name], "n": n, "norm": norm}
            for name, (norm, n) in self.outputs.items()
        ]
        for name, (norm, n) in self.gradients.items():
            position = at.get(self.owner(name), -1)
            rows.append({**when, "kind": "gradient", "name": name, "position": position, "n": n, "norm": norm})
        return rows


def first_nonfinite(entry: Entry) -> tuple[str, str] | None:
    """(name, `output` or `gradient`) of the first bad norm in order of execution; None where all are finite."""
    for name, (norm, _) in entry.outputs.items():
        if not math.isfinite(norm):
            return name, "output"
    at = entry.positions()
    bad = [name for name, (norm, _) in entry.gradients.items() if not math.isfinite(norm)]
    if not bad:
        return None
    return max(bad, key=lambda name: at.get(entry.owner(name), -1)), "gradient"  # backward is the other way round


def first_unusual(entry: Entry, past: list[Entry], factor: float) -> tuple[str, str, float] | None:
    """(name, kind, times its median) of the first output over `factor` times its median, else of the gradient that
    has grown the most."""
    for name, (norm, _) in entry.outputs.items():
        usual = median([e.outputs[name][0] for e in past if name in e.outputs] or [0.0])
        if usual > 0 and norm > factor * usual:
            return name, "output", norm / usual
    grown = {
        name: norm / usual
        for name, (norm, _) in entry.gradients.items()
        if (usual := median([e.gradients[name][0] for e in past if name in e.gradients] or [0.0])) > 0
    }
    if not grown:
        return None
    worst = max(grown, key=lambda name: grown[name])
    return worst, "gradient", grown[worst]


class BlackBox:
    """`add` each step, `trigger` on demand. Both return the event of why rows are written, or None, and the rows."""

    def __init__(self, follow_steps: int) -> None:
        self._follow_steps = follow_steps
        self._ring: deque[Entry] = deque(maxlen=PAST_STEPS)
        self._baseline: deque[Entry] = deque(maxlen=PAST_STEPS)
        """Finite steps, whether written or not: what a spike is one against."""
        self._was_bad = False
        self._to_follow = 0
        self._n_dumps = 0

    def add(self, entry: Entry) -> tuple[Event | None, list[Row]]:
        why = self._judge(entry)
        if not self._was_bad:
            self._baseline.append(entry)
        self._ring.append(entry)
        if why is not None:
            return self._dump(why)
        if self._to_follow:
            self._to_follow -= 1
            return None, self._take_all()
        return None, []

    def trigger(self, reason: str) -> tuple[Event | None, list[Row]]:
        return self._dump(Event(EVENT, "", "asked", text=f"asked: {reason}"))

    def _judge(self, entry: Entry) -> Event | None:
        bad = first_nonfinite(entry)
        was_bad, self._was_bad = self._was_bad, bad is not None
        if bad is not None:
            name, kind = bad
            words = f"nonfinite: first bad module in order of execution: {name} ({kind})"
            return None if was_bad else Event(EVENT, name, "nonfinite", text=words)
        past = list(self._baseline)
        if len(past) < MIN_PAST or self._to_follow:
            return None
        usual = median(e.gradient_norm for e in past)
        if not entry.gradient_norm > SPIKE_FACTOR * usual > 0:
            return None
        found = first_unusual(entry, past, SPIKE_FACTOR)
        where = f"; first in order of execution: {found[0]} ({found[1]}, {found[2]:.1f} x its median)" if found else ""
        times = entry.gradient_norm / usual
        words = f"spike: gradient norm {entry.gradient_norm:.4g}, {times:.1f} x its median{where}"
        return Event(EVENT, found[0] if found else "", "spike", {"norm": entry.gradient_norm, "times": times}, words)

    def _dump(self, why: Event) -> tuple[Event | None, list[Row]]:
        self._n_dumps += 1
        if self._n_dumps > MAX_DUMPS:
            return why._replace(text=f"{why.text}; not written: {MAX_DUMPS} were"), []
        n_before = max(len(self._ring) - 1, 0)
        self._to_follow = self._follow_steps
        return why._replace(text=f"{why.text}; with {n_before} steps before it"), self._take_all()

    def _take_all(self) -> list[Row]:
        rows = [row for entry in self._ring for row in entry.rows()]
        self._ring.clear()
        return rows


@dataclass(frozen=True)
class Norms:
    """The norms of one step, still on their devices: (name, elements) beside float32 [n] for each device."""

    step: int
    time_ns: int
    outputs: list[tuple[list[tuple[str, int]], torch.Tensor]]
    gradients: list[tuple[list[tuple[str, int]], torch.Tensor]]
    ready: list[tuple[torch.device, Any]]
