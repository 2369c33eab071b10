"""How long steps take by the device's own clock: probed against unprobed, by CUDA events. Nothing waits for the device.

    step = elapsed(event at its boundary - event at the one before)      read once both are past, at some later boundary
    overhead of a probe = median(probed steps) - median(unprobed steps)

The host's clock says when a step was queued, which is the same only where the host keeps up with the device.
Not verified on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.part import Job, Part
from mxprobe.events import Event, Tell

KEPT = 256
"""Steps of each kind."""
MAX_PENDING = 64
"""Boundaries that the device may be behind; beyond it the oldest are given up."""


class StepTimes(NamedTuple):
    probed_ms: float
    """Median."""
    unprobed_ms: float
    n_probed: int
    n_unprobed: int


class DeviceSteps(Part):
    name = "device steps"

    def __init__(self, clock: Clock, tell: Tell, new_event: Callable[[], Any] | None = None) -> None:
        """`new_event`: makes an event that has `record`, `query` and `elapsed_time`; found by the model's device."""
        self._clock = clock
        self._tell = tell
        self._new_event = new_event
        self._pending: deque[tuple[Any, bool]] = deque()
        """(event at the end of a step, was it probed)."""
        self._ms: dict[bool, deque[float]] = {kind: deque(maxlen=KEPT) for kind in (True, False)}

    def watch(self, roots: Sequence[nn.Module]) -> None:
        first = next((p for root in roots for p in root.parameters()), None)
        if first is not None and first.is_cuda:
            self._new_event = _new_cuda_event

    def finish(self) -> Iterable[Job]:
        self.mark(probed=self._clock.is_watched)
        return ()

    def remove(self) -> None:
        words = self.words()
        if words:
            self._tell(Event("overhead", "", "step_times", text=words))

    def status(self) -> dict[str, Any]:
        return {"device_steps": self.words()}

    def mark(self, *, probed: bool) -> None:
        """The step that ends here was probed, or not."""
        if self._new_event is None:
            return
        event = self._new_event()
        event.record()
        self._pending.append((event, probed))
        while len(self._pending) > 1 and self._pending[1][0].query():
            begin, _ = self._pending.popleft()
            end, was_probed = self._pending[0]
            self._ms[was_probed].append(begin.elapsed_time(end))
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()

    @property
    def times(self) -> StepTimes | None:
        """None until steps of both kinds were timed."""
        probed, unprobed = (list(self._ms[kind]) for kind in (True, False))
        if not probed or not unprobed:
            return None
        return StepTimes(median(probed), median(unprobed), len(probed), len(unprobed))

    def words(self) -> str:
        """ "" until steps of both kinds were timed."""
        times = self.times
        if times is None:
            return ""
        return (
            f"by CUDA events a probed step takes {times.probed_ms:.2f} ms (median of {times.n_probed}), another "
            f"{times.unprobed_ms:.2f} ms (of {times.n_unprobed})"
        )


def _new_cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)
