"""How long steps take by the device's own clock: probed against unprobed, by CUDA events. Nothing waits for the device.

    step = elapsed(event at its boundary - event at the one before)      read once both are past, at some later boundary
    overhead of a probe = median(probed steps) - median(unprobed steps)

The host's clock says when a step was queued, which is the same only where the host keeps up with the device.
Not verified on a GPU.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any, Callable, NamedTuple

import torch

KEPT = 256
"""Steps of each kind."""
MAX_PENDING = 64
"""Boundaries that the device may be behind; beyond it the oldest are given up."""
EVENT = "overhead"


class StepTimes(NamedTuple):
    probed_ms: float
    """Median."""
    unprobed_ms: float
    n_probed: int
    n_unprobed: int


class DeviceSteps:
    """`mark` at each step boundary, in the training thread."""

    def __init__(self, new_event: Callable[[], Any] | None) -> None:
        """`new_event`: makes an event that has `record`, `query` and `elapsed_time`; None without a device."""
        self._new_event = new_event
        self._pending: deque[tuple[Any, bool]] = deque()
        """(event at the end of a step, was it probed)."""
        self._ms: dict[bool, deque[float]] = {kind: deque(maxlen=KEPT) for kind in (True, False)}

    @classmethod
    def of(cls, device_type: str) -> DeviceSteps:
        return cls(_new_cuda_event if device_type == "cuda" else None)

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
