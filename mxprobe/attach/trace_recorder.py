"""The trace that the controllers write: a partition for each process, and `run.json`, which lists them as `ranks`."""

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from mxprobe.attach.mismatch_watch import MismatchWatch
from mxprobe.errors import TraceError, UsageError
from mxprobe.events import RANK_LOST, Event
from mxprobe.metrics import canonicalize
from mxprobe.protocol import Frame
from mxprobe.trace import Retention, TraceWriter
from mxprobe.trace.layout import looks_like_trace
from mxprobe.trace.object_store import Mirror

# Facts that are the same for all processes; they are at the top level of `run.json` only.
_SHARED = ("config", "command_line", "started_ns")

OUTLIVED_S = 10.0
"""Ranks of a run that is over end within seconds of each other; one that ended so much earlier was lost."""


def check_free(directory: Path) -> None:
    """Raise UsageError if the directory cannot take a new trace. Called before anything is attached."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", remedy="name another one with -o")
    if directory.is_dir() and looks_like_trace(directory):
        raise UsageError(
            f"{directory} already holds a trace",
            cause="an earlier attach wrote there",
            remedy="name another directory with -o, or remove that one",
        )


class RunTrace:
    """The trace that the controllers of a run share. Any thread may use it.

    It is opened with the first thing worth keeping, so refused attaches leave no directory behind. It is closed when
    `done` has been called for the last process.

    Args:
        directory: directory of the trace.
        pids: the processes; `done` is to be called for each.
        run: facts for `run.json` that belong to no single process.
        beside: the pids that are no rank; they get the last partitions.
        retention: how much of the trace stays at full resolution.
        copy_to: URL to which the trace is copied while it is written.
    """

    def __init__(
        self,
        directory: Path,
        pids: Iterable[int],
        run: Mapping[str, Any],
        *,
        beside: Container[int] = (),
        retention: Retention | None = None,
        copy_to: str | None = None,
    ) -> None:
        self.directory = directory
        self._pids = set(pids)
        self._n = len(self._pids)
        self._beside = beside
        self._retention = retention
        self._copy_to = copy_to
        self._run = dict(run)
        self._ranks: dict[int, dict[str, Any]] = {}
        self._refused: dict[int, dict[str, Any]] = {}
        self._partitions: dict[int, int] = {}
        self._writer: TraceWriter | None = None
        self._gone: dict[int, tuple[float, int, Event]] = {}
        """Rank that ended without a word -> when (monotonic, s), its last step, and what to write if it was lost."""
        self.lost: list[str] = []
        """The ranks that others have outlived, in words."""
        self._lock = threading.RLock()

    def claim(self, pid: int, wanted: int) -> int:
        """Return the partition of a process: the rank it says it has, or the next free number where that is taken."""
        with self._lock:
            if pid not in self._partitions:
                taken = set(self._partitions.values())
                if pid in self._beside:
                    self._partitions[pid] = next(n for n in reversed(range(self._n)) if n not in taken)
                else:
                    free = next(n for n in range(len(taken) + 1) if n not in taken)
                    self._partitions[pid] = free if wanted in taken else wanted
            return self._partitions[pid]

    def open(self) -> TraceWriter:
        with self._lock:
            if self._writer is None:
                mirror = None if self._copy_to is None else Mirror(self.directory, self._copy_to)
                self._writer = TraceWriter(self.directory, self._facts(), retention=self._retention, mirror=mirror)
            return self._writer

    def set_rank(self, rank: int, facts: Mapping[str, Any]) -> None:
        """Write the facts of an attached process. Those of the lowest rank are also at the top level."""
        with self._lock:
            self._ranks[rank] = dict(facts)
            self._update()

    def refuse(self, pid: int, *, reason: str, what: str) -> None:
        """Note a process that could not be attached. `run.json` lists it if others were attached."""
        try:
            with self._lock:
                self._partitions.pop(pid, None)
                self._refused[pid] = {"reason": reason, "what": what}
                self._update()
        finally:
            self.done(pid)

    def gone(self, rank: int, step: int, event: Event) -> None:
        """Note that a process ended without a word. At the end of a run all do so, within seconds."""
        with self._lock:
            self._gone[rank] = time.monotonic(), step, event

    def write_lost(self) -> None:
        """Write events `rank_lost` for those that others have outlived by `OUTLIVED_S`. Any living rank calls this."""
        with self._lock:
            now = time.monotonic()
            lost = [rank for rank, (at, _, _) in self._gone.items() if now - at > OUTLIVED_S]
            for rank in lost:
                _, step, event = self._gone.pop(rank)
                self.lost.append(event.words)
                row = {"step": step, "time_ns": time.time_ns(), **event.columns()}
                self.open().append("events", {name: [value] for name, value in row.items()}, rank=rank)

    def done(self, pid: int) -> None:
        """Note that nothing more comes from that process."""
        with self._lock:
            self._pids.discard(pid)
            if self._pids:
                return
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _update(self) -> None:
        if self._writer is not None:
            self._writer.update_run(**self._facts())

    def _facts(self) -> dict[str, Any]:
        ranks = [{"rank": rank, **_of_one(facts)} for rank, facts in sorted(self._ranks.items())]
        first = self._ranks[min(self._ranks)] if self._ranks else {}
        refused = [{"pid": pid, **why} for pid, why in sorted(self._refused.items())]
        return {**self._run, **first, "ranks": ranks, **({"refused": refused} if refused else {})}


def _of_one(facts: Mapping[str, Any]) -> dict[str, Any]:
    target = facts.get("target", {})
    kept = {key: value for key, value in facts.items() if key not in (*_SHARED, "target")}
    return {"pid": target.get("pid"), "torch": target.get("torch"), **kept}


class TraceRecorder:
    """One process's share of a trace. It counts what it writes, and calls `on_jump` when a logged mismatch jumps."""

    def __init__(self, trace: RunTrace, pid: int, on_jump: Callable[[str], None] | None = None) -> None:
        self.rank = self.n_batches = self.n_rows = 0
        self.last_step: int | None = None
        self.trace = trace
        self._pid = pid
        self._wanted = 0
        self._facts: dict[str, Any] = {}
        self._on_jump = on_jump
        self._mismatch = MismatchWatch()
        self._opened = False
        self._lock = threading.Lock()

    def claim_rank(self, wanted: int) -> None:
        """Ask for a rank. The first row takes the number, so that a refused process takes none from the others."""
        self._wanted = wanted

    def _claim(self) -> None:
        self.rank = self.trace.claim(self._pid, self._wanted)

    def update_run(self, **fields: Any) -> None:
        """Add facts of this process for `run.json`; they are kept until it is attached."""
        with self._lock:
            self._facts.update(fields)
            if self._opened:
                self.trace.set_rank(self.rank, self._facts)

    def open(self) -> None:
        """Give the process, which is now attached, its place in the trace."""
        self._claim()
        with self._lock:
            self._opened = True
            self.trace.set_rank(self.rank, self._facts)
        self.trace.open()

    def write(self, frame: Frame) -> None:
        """Append a `batch` frame; durable when it returns. TraceError if the disk or the rows do not allow it."""
        self._claim()
        table, columns = str(frame["table"]), dict(frame["columns"])
        if table == "signals":
            columns = dict(canonicalize(columns))
            if self._on_jump is not None and (jump := self._mismatch.see(columns)):
                self._on_jump(jump)
        try:
            self.trace.open().append(table, columns, rank=self.rank)
            self.trace.write_lost()
        except KeyError as error:
            raise TraceError(f"a batch lacks {error}", cause="an agent of another version") from None
        self.n_batches += 1
        self.n_rows += len(next(iter(columns.values()), ()))
        steps = columns.get("step")
        if steps:
            self.last_step = max(self.last_step or 0, max(steps))

    def end(self, reason: str) -> None:
        """Write why it ended, once, if it had begun."""
        if self._opened and "ended" not in self._facts:
            try:
                self.update_run(ended={"reason": reason, "time_ns": time.time_ns()})
                self.trace.write_lost()
                if reason in ("agent_lost", "target_exited"):
                    data = {"pid": self._pid, "reason": reason}
                    event = Event(RANK_LOST, f"rank {self.rank}", "ended", data)
                    self.trace.gone(self.rank, -1 if self.last_step is None else self.last_step, event)
            finally:  # the others of the run wait for it, whatever the disk says
                self.trace.done(self._pid)
