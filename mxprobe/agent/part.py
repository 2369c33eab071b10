"""What a session is made of: parts, each of which measures one thing, or looks after one.

A part is one file in `mxprobe/agent/parts/` and one line in its list (`mxprobe.agent.parts.all_parts`). The session
calls the methods of `Part` for every part in the order of the list, each call guarded by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.schema import TableRow

TRAINER, ROLLOUT, METRICS = "trainer", "rollout", "metrics"
"""Roles of a process: it takes optimizer steps, it serves a model, or it logs and runs no model."""


CPU = torch.device("cpu")


def no_rows() -> Iterable[TableRow]:
    return ()


@dataclass(frozen=True)
class Job:
    """Work for the agent's own thread, on what a part copied in the training thread."""

    rows: Callable[[], Iterable[TableRow]] = no_rows
    """Makes (table, row) pairs; called once the copies hold their values, on a stream of our own."""
    device: torch.device = CPU
    ready: Sequence[Any] = ()
    """CUDA events after which the copies hold their values; None and nothing on a CPU."""
    held: Any = None
    """The copies, which count as memory of ours until the job is over."""
    n_snapshots: int = 0
    """Calls that are measured: the job's time is measuring time, and it is given up where the agent has to leave."""
    flush: bool = False
    """Send what there is so far, once the rows are made."""
    is_urgent: bool = True
    """False for small jobs of every step, which may wait: waking a thread can cost the caller its turn."""


class Part:
    """One thing that is measured, or looked after. A part overrides what it needs.

    The methods are called in the training thread at a step boundary, where nothing else is said; they neither wait
    nor read a device.
    """

    name = ""
    """The place at which errors of the part are told."""
    roles: tuple[str, ...] = (TRAINER, ROLLOUT)
    """The processes that it is for: elsewhere it is not told of a model or of steps."""
    is_busy = False
    """No step is to be probed yet."""

    def observe(self) -> None:
        """The session begins: the model is not known yet. Called in the agent's thread."""

    def can_listen(self) -> bool:
        """Whether there is something to measure in a process that runs no model. Called in the agent's thread."""
        return False

    def listen(self) -> None:
        """The process runs no model. Called in the agent's thread, again and again."""

    def watch(self, roots: Sequence[nn.Module]) -> None:
        """The model is known: these are its outermost modules. Put in what stays in until `remove`."""

    def begin(self) -> None:
        """A step begins; the clock says what of it is measured. Put in what is for this step alone."""

    def finish(self) -> Iterable[Job]:
        """The step is over: take out what was for it alone, and return what there is to do about it."""
        return ()

    def boundary(self) -> None:
        """The step is over and every part has finished with it; the next one has not begun."""

    def ask(self, frame: Mapping[str, Any]) -> None:
        """The user has sent a command: `verb` says which. Called in the agent's thread."""

    def remove(self) -> None:
        """Take everything out and let go of it. May be called by any thread, and before anything was put in."""

    def close(self) -> None:
        """Everything is out. Called in the agent's thread, which may wait."""

    def rows(self) -> Iterable[TableRow]:
        """Rows on the model as a whole: at attach, after the first probed step, and at the end. Our own thread."""
        return ()

    def status(self) -> dict[str, Any]:
        """Members of `status` frames. Called in the agent's thread."""
        return {}
