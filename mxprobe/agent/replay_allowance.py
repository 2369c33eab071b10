"""Which of the replays that are due fit into `--max-gpu-memory` and the device: told before one runs, never tried out.

A replay for sensitivity is made of no more samples than fit. One that does not fit now, because copies of a probed step
are still held, waits for a later step; one that never will is skipped, with the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from mxprobe.agent import allocator
from mxprobe.agent.memory import DeviceMemory, Room, bytes_of, megabytes
from mxprobe.measuring.operands.extent import element_bytes
from mxprobe.measuring.replay.captured_call import Call
from mxprobe.measuring.replay.memory_need import Shapes
from mxprobe.measuring.replay.sensitivity import CPU_MAX_ROWS, DEVICE_MAX_ROWS, can_be_cut

SENSITIVITY, REPLAYS = "sensitivity", "replays"
_WHAT = {SENSITIVITY: "a replay for sensitivity", REPLAYS: "a replay under other roundings"}


class Plan(NamedTuple):
    """What is replayed now."""

    runs: frozenset[str]
    skipped: frozenset[str]
    """Never to fit; the others that were due stay so."""
    max_rows: int
    """Of sensitivity."""
    in_parts_only: bool
    needs: Mapping[str, int]
    """Bytes, estimated, of each that was due."""


class Allowance:
    def __init__(self, memory: DeviceMemory, is_busy: Callable[[], bool], tell: Callable[[str, str], None]) -> None:
        """`is_busy`: copies are held that are not measured yet."""
        self._memory = memory
        self._is_busy = is_busy
        self._tell = tell

    def plan(self, due: frozenset[str], call: Call, shapes: Shapes, n_directions: int) -> Plan:
        rows = CPU_MAX_ROWS if call.device_type == "cpu" else DEVICE_MAX_ROWS
        n_least = 1 if can_be_cut(call) else shapes.n_samples
        n_most = max(shapes.samples_that_fit(float("inf"), rows), n_least)
        needs = {SENSITIVITY: shapes.of_sensitivity(n_most), REPLAYS: shapes.of_arms(n_directions)}
        room = self._memory.room_for_replay(busy=self._is_busy(), free=allocator.free_bytes(device_of(call)))
        if room is None:
            return Plan(due, frozenset(), rows, False, {what: needs[what] for what in due})
        n = n_most if n_least > 1 else shapes.samples_that_fit(room.now, rows)
        needs[SENSITIVITY] = shapes.of_sensitivity(max(n, n_least))
        least = {**needs, SENSITIVITY: shapes.of_sensitivity(n_least)}
        runs = frozenset(what for what in due if needs[what] <= room.now)
        skipped = frozenset(what for what in due if least[what] > room.at_best)
        for what in sorted(skipped):
            self._say_skipped(what, least[what], room)
        is_cut = n_least == 1 and shapes.of_sensitivity(shapes.n_samples) > room.now
        most = max(n, 1) * shapes.rows_per_sample
        return Plan(runs, skipped, min(rows, most) if is_cut else rows, is_cut, {what: needs[what] for what in due})

    def _say_skipped(self, what: str, needed: int, room: Room) -> None:
        would, left = f"{_WHAT[what]} would hold {megabytes(needed)} (estimated)", megabytes(int(room.at_best))
        self._memory.skipped = f"{would} of {left}: skipped"
        self._tell(f"no_{what}", f"no {what}: {would}, and --max-gpu-memory leaves {left} for it; skipped")

    def begin(self, call: Call) -> allocator.Stats:
        return allocator.stats_of(device_of(call))

    def end(self, call: Call, plan: Plan, before: allocator.Stats) -> None:
        """A replay as planned is over; `before`: what `begin` returned."""
        estimated = max((plan.needs[what] for what in plan.runs), default=0)
        held = allocator.Held(0, 0)
        if before:
            held = allocator.held_between(before, allocator.stats_of(device_of(call)))
        self._memory.replayed(estimated, held)


def device_of(call: Call) -> torch.device:
    return next((p.device for p in call.module.parameters()), torch.device("cpu"))


def shapes_of(call: Call, modules: Mapping[str, nn.Linear], policy: tuple[int, ...], at_policy: Any) -> Shapes:
    """`policy`: shape of the policy [B, T, V] or [B, T]; `at_policy`: gradients that are kept of it."""
    dtype = call.autocast_dtype
    sizes = [element_bytes(module) for module in modules.values()]
    b = dtype.itemsize if dtype is not None else max(sizes, default=4)
    kept = bytes_of((call.args, call.kwargs, call.whole, at_policy), call.device_type)
    return Shapes.of(modules, policy, b, kept)
