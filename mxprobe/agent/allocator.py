"""Memory that we took of a CUDA device, by torch's allocator. Nothing waits for the device, no statistic is reset.

    a replay    in the training thread: by how much it raised the peak of the process, and what it held where it did
    measuring   on a stream of its own: all memory that the allocator keeps for that stream

Statistics of the allocator are the process's, and the run may read them: they are compared, never set back. Written
against `torch.cuda.memory_stats` and `torch.cuda.memory_snapshot` of torch 2.6 to 2.13. Not verified on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch

ALLOCATED, PEAK = "allocated_bytes.all.current", "allocated_bytes.all.peak"
RESERVED = "reserved_bytes.all.current"
Stats = Mapping[str, Any]


class Held(NamedTuple):
    raised: int
    """Bytes by which the peak of the process rose."""
    at_most: int
    """Bytes held above what was there before; 0 where the peak did not rise, so that it cannot be told."""


def held_between(before: Stats, after: Stats) -> Held:
    """Compare statistics before and after what was done by the only thread that allocates."""
    raised = max(int(after.get(PEAK, 0)) - int(before.get(PEAK, 0)), 0)
    return Held(raised, int(after[PEAK]) - int(before[ALLOCATED]) if raised else 0)


def reserved_for(stream: int, segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of the segments that belong to a stream; they are its own until memory is short."""
    return sum(int(segment["total_size"]) for segment in segments if segment.get("stream") == stream)


def stats_of(device: torch.device) -> Stats:
    return torch.cuda.memory_stats(device) if device.type == "cuda" else {}


def reserved_bytes(stream: Any) -> int:
    """Return what the allocator keeps for a `torch.cuda.Stream`."""
    return reserved_for(stream.cuda_stream, torch.cuda.memory_snapshot())


def free_bytes(device: torch.device, stats: Callable[[torch.device], Stats] = stats_of) -> int | None:
    """Return what nobody has of the device and what the allocator keeps unused; None on a CPU."""
    if device.type != "cuda":
        return None
    known = stats(device)
    unused = int(known.get(RESERVED, 0)) - int(known.get(ALLOCATED, 0))
    return torch.cuda.mem_get_info(device)[0] + max(unused, 0)
