"""What we take of the run's device: one budget, kept by measuring less at a time, and the measured peak.

    copies + measuring <= limit     snapshots of a probed step, weights of a step, log-probabilities, an engine's rows;
    replay + measuring <= limit     measuring one module at a time, whose memory its stream keeps; a replay

Before a step is probed the modules whose turn it is are taken as long as an upper bound of their copies fits, and of
what measuring the largest of them takes for itself; an eighth of the limit is left for what else is copied. A module
that would not fit alone is measured on fewer rows and features. Where the copies were larger than that all the same,
the steps that follow take less by as much. On a CPU the limit is `HOST_BYTES` of its memory, for the copies alone. On
CUDA what measuring takes is read off the allocator (`allocator`) now and then; a replay's need is `replay.need`'s.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Callable, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from mxprobe.agent import allocator
from mxprobe.agent.allocator import Held
from mxprobe.events import Event, Tell

HOST_BYTES = 1 << 30
RESERVED = 1 / 8
_DEPTH = 6

Release = Callable[[], None]


class Probe(Protocol):
    """What the budget knows of a module under observation."""

    name: str
    module: nn.Module
    last_probed: int
    why_unread: str

    @property
    def sample_bytes(self) -> int: ...
    @property
    def working_bytes(self) -> int: ...
    def shrink(self, max_bytes: int) -> bool: ...


AnyProbe = TypeVar("AnyProbe", bound=Probe)


class DeviceMemory:
    """`settle` once the model is known, `choose` before a probed step; `take` and `hold` from any thread."""

    def __init__(self, max_gpu_bytes: int, tell: Tell) -> None:
        """`max_gpu_bytes`: 0 for no limit."""
        self.where = torch.device("cpu")
        self.device = "cpu"
        self.limit = HOST_BYTES
        """Bytes; 0 for none."""
        self.peak = 0
        """Bytes of copies held at once, at most."""
        self.measuring_peak = 0
        """Bytes that the allocator keeps for the stream that measures; 0 where it was not asked."""
        self.replay_peak = 0
        """Bytes that a replay held, at most: by the allocator where that can tell, else as estimated."""
        self.skipped = ""
        """Which replays were not made for want of memory, in words."""
        self._replay_scale = self._working_scale = 1.0
        self._foreseen = 0.0
        self._n_looks = 0
        self._max_gpu_bytes = max_gpu_bytes
        self._tell = tell
        self._lock = threading.Lock()
        self._of_step = self._others = self._step_peak = 0
        self._scale = 1.0
        self._has_told = False

    def settle(self, probes: Sequence[Probe]) -> None:
        """Read off where the model is; probes that do not fit alone are made smaller, or left out."""
        self.where = next((p.device for probe in probes for p in probe.module.parameters()), self.where)
        self.device = self.where.type
        if self.device == "cpu":
            return
        self.limit = self._max_gpu_bytes
        if not self.limit:
            return
        smaller = [probe.name for probe in probes if probe.shrink(self._room)]
        for probe in probes:
            if probe.sample_bytes + probe.working_bytes > self._room:
                probe.why_unread = f"not measured: {self._why}"
        if smaller:
            words = f"fewer rows and features of {len(smaller)} modules ({smaller[0]}, ...): {self._why}"
            self._tell(Event("thinned", smaller[0], "fewer_rows", {"n_modules": len(smaller)}, words))

    def choose(self, probes: Sequence[AnyProbe], share: float) -> list[AnyProbe]:
        """Whose turn it is: at most that share of them, and no more than fit. The last step's are measured by now."""
        with self._lock:
            if self.limit and self._step_peak > self.limit:
                self._scale *= self.limit / self._step_peak
            self._of_step, self._step_peak = 0, self._others
        wanted = sorted(probes, key=lambda probe: probe.last_probed)[: math.ceil(share * len(probes))]
        if not self.limit:
            return wanted
        room, copied, working, scale = self._room, 0, 0.0, self._working_scale
        chosen: list[AnyProbe] = []
        for probe in wanted:
            if self.device != "cpu":
                probe.shrink(int(room / scale))
            with_it = copied + probe.sample_bytes
            largest = max(working, probe.working_bytes * scale) if self.device != "cpu" else 0.0
            if with_it + largest <= room or (self.device == "cpu" and not chosen):
                chosen.append(probe)
                copied, working = with_it, largest
        self._foreseen = working / scale
        if len(chosen) < len(wanted) and not self._has_told:
            self._has_told = True
            words = f"a probed step measures {len(chosen)} of {len(probes)} modules, in turn: {self._why}"
            self._tell(Event("thinned", "", "in_turn", {"n_chosen": len(chosen), "n_modules": len(probes)}, words))
        return chosen

    @property
    def _room(self) -> int:
        """Bytes for the snapshots of one step."""
        if self.device == "cpu":
            return self.limit
        beyond = max(self._others - RESERVED * self.limit, 0.0)
        return int(((1 - RESERVED) * self.limit - beyond) * self._scale)

    @property
    def _why(self) -> str:
        flag = "" if self.device == "cpu" else " (--max-gpu-memory)"
        what = "their copies are" if self.device == "cpu" else "their copies, and measuring them, are"
        return f"{what} to take {megabytes(self.limit)} at most{flag}"

    @property
    def reserve(self) -> int:
        """Bytes for what is copied beside the snapshots."""
        return int(RESERVED * (self.limit or HOST_BYTES))

    def take(self, snapshot: Any) -> None:
        """A snapshot is handed over; it is held until the next step is chosen for."""
        n_bytes = bytes_of(snapshot, self.device)
        with self._lock:
            self._of_step += n_bytes
            self._note()

    def hold(self, copies: Any) -> Release:
        """Other copies; call what it returns once they are let go."""
        n_bytes = bytes_of(copies, self.device)
        with self._lock:
            self._others += n_bytes
            self._note()

        def release() -> None:
            with self._lock:
                self._others -= n_bytes

        return release

    def _note(self) -> None:
        now = self._of_step + self._others
        self.peak, self._step_peak = max(self.peak, now), max(self._step_peak, now)

    def room_for_replay(self, *, busy: bool, free: int | None = None) -> Room | None:
        """None without a limit, as on a CPU. `busy`: a step's copies are not measured yet; `free`: on the device."""
        if self.device == "cpu" or not self.limit:
            return None
        at_best = max((1 - RESERVED) * self.limit - self.measuring_peak, 0.0)
        now = at_best - max(self._others - RESERVED * self.limit, 0.0)
        if busy:
            now = 0.0
        if free is not None:
            now = min(now, float(free))
        return Room(now / self._replay_scale, at_best / self._replay_scale)

    def replayed(self, estimated: int, held: Held) -> None:
        """A replay is over. One that held more than was foreseen makes later ones smaller."""
        self.replay_peak = max(self.replay_peak, held.at_most or estimated)
        self._replay_scale = max(self._replay_scale, held.at_most / max(estimated, 1))

    def look(self, stream: Any) -> None:
        """A step was measured on that stream. The allocator, which lists all that it has, is asked now and then."""
        self._n_looks += 1
        if stream is not None and not self._n_looks & (self._n_looks - 1):
            self.measured(allocator.reserved_bytes(stream))

    def measured(self, reserved: int) -> None:
        """What the allocator keeps for the stream that measures. More than was foreseen makes later steps smaller."""
        if reserved > self.measuring_peak and self._foreseen:
            self._working_scale = max(self._working_scale, reserved / self._foreseen)
        self.measuring_peak = max(self.measuring_peak, reserved)

    @property
    def peak_bytes(self) -> int:
        """Of all of it at once, at most."""
        return self.measuring_peak + max(self.peak, self.replay_peak)

    def words(self) -> str:
        parts = [f"copies of {megabytes(self.peak)} at once at most"]
        if self.measuring_peak:
            parts.append(f"{megabytes(self.measuring_peak)} to measure them")
        if self.replay_peak:
            parts.append(f"a replay of {megabytes(self.replay_peak)} at most")
        limit = f"limit {megabytes(self.limit)}" if self.limit else "no limit"
        return ", ".join([*parts, f"in memory of {self.device}", limit, *([self.skipped] if self.skipped else [])])


class Room(NamedTuple):
    """Bytes that a replay may hold."""

    now: float
    at_best: float
    """When nothing of ours is held but what is always."""


def megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


def bytes_of(thing: Any, device_type: str) -> int:
    """Of the tensors on that kind of device in what the agent copied, each counted once."""
    seen: set[int] = set()

    def add(each: Any, depth: int) -> int:
        if id(each) in seen or depth > _DEPTH:
            return 0
        if isinstance(each, torch.Tensor):
            seen.add(id(each))
            return each.numel() * each.element_size() if each.device.type == device_type else 0
        if isinstance(each, dict):
            return sum(add(value, depth + 1) for value in each.values())
        if isinstance(each, (list, tuple)):
            return sum(add(value, depth + 1) for value in each)
        if is_dataclass(each) and not isinstance(each, type):
            return sum(add(getattr(each, field.name), depth + 1) for field in fields(each))
        if type(each).__module__.startswith("mxprobe.") and hasattr(each, "__dict__"):
            return sum(add(value, depth + 1) for value in vars(each).values())
        return 0

    return add(thing, 0)
