"""Steps timed by a device that lags behind: by its own clock, and without waiting for it."""

from __future__ import annotations

import torch

from mxprobe.agent.clock import Clock
from mxprobe.agent.parts.device_steps import MAX_PENDING, DeviceSteps


class Device:
    """A queue of events whose times come when the device gets to them. `torch.cuda.Event`'s methods."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.reached = 0
        self.events: list[Event] = []

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.at = self._device.now_ms
        self.index = len(self._device.events)
        self._device.events.append(self)

    def query(self) -> bool:
        return self.index < self._device.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "reading an event that the device has not reached waits for it"
        return end.at - self.at


def test_probed_and_unprobed_steps_are_told_apart_on_the_device_s_clock():
    device = Device()
    steps = DeviceSteps(Clock(), lambda *_: None, device.event)
    for step in range(40):
        probed = step % 10 == 9
        device.now_ms += 12.0 if probed else 10.0
        steps.mark(probed=probed)
        device.reached = max(step - 5, 0)  # five steps behind
    times = steps.times
    assert times is not None
    assert (times.probed_ms, times.unprobed_ms) == (12.0, 10.0)
    assert times.n_probed == 3
    assert steps.words() == (
        f"by CUDA events a probed step takes 12.00 ms (median of 3), another 10.00 ms (of {times.n_unprobed})"
    )


def test_a_device_that_never_answers_is_not_waited_for():
    device = Device()
    steps = DeviceSteps(Clock(), lambda *_: None, device.event)
    for _ in range(4 * MAX_PENDING):
        steps.mark(probed=True)
    assert steps.times is None
    assert len(steps._pending) == MAX_PENDING  # pyright: ignore[reportPrivateUsage]


def test_without_a_device_there_is_nothing_to_time():
    steps = DeviceSteps(Clock(), lambda *_: None)
    steps.watch([torch.nn.Linear(2, 2)])
    steps.mark(probed=True)
    assert (steps.times, steps.words()) == (None, "")
