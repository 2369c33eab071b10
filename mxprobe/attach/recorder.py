"""What the controllers write: one trace, a partition per process, and `run.json`, which lists them as `ranks`."""

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

# Of one process, and the same for all; at the top level of `run.json` only.
_SHARED = ("config", "command_line", "started_ns")

OUTLIVED_S = 10.0
"""Ranks of a run that is over end within seconds of each other; one that ended so much earlier was lost."""


def check_free(directory: Path) -> None:
    """UsageError if the directory cannot take a new trace; asked before anybody is attached to."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", remedy="name another one with -o")
    if directory.is_dir() and looks_like_trace(directory):
        raise UsageError(
            f"{directory} already holds a trace",
            cause="an earlier attach wrote there",
            remedy="name another directory with -o, or remove that one",
        )


class RunTrace:
    """The trace that the controllers of a run share. Safe to share between threads.

    Opened with the first thing worth keeping: refused attaches leave no directory behind. Closed when the last
    process is done with.

    Args:
        directory: of the trace.
        pids: the processes that will be `done` with.
        run: facts for `run.json` that are no single process's.
        beside: those of the pids that are no rank; they get the last partitions.
        retention: how much of the trace stays at full resolution.
        copy_to: URL that the trace is copied to while it is written.
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
        """Rank that is gone without a word -> when (monotonic), its last step, and what is to be said of it."""
        self.lost: list[str] = []
        """In words, the ranks that others have outlived."""
        self._lock = threading.RLock()

    def claim(self, pid: int, wanted: int) -> int:
        """The partition of a process: the rank it says it has, or the next free number where that is taken."""
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
        """What is known of an attached process; those of the lowest rank are also at the top level."""
        with self._lock:
            self._ranks[rank] = dict(facts)
            self._update()

    def refuse(self, pid: int, *, reason: str, what: str) -> None:
        """A process that could not be attached; told in `run.json` if others were."""
        try:
            with self._lock:
                self._partitions.pop(pid, None)
                self._refused[pid] = {"reason": reason, "what": what}
                self._update()
        finally:
            self.done(pid)

    def gone(self, rank: int, step: int, event: Event) -> None:
        """A process ended without a word: at the end of a run all do so, within seconds."""
        with self._lock:
            self._gone[rank] = time.monotonic(), step, event

    def tell_gone(self) -> None:
        """Events `rank_lost` of those that others have outlived by `OUTLIVED_S`; by whoever of them lives."""
        with self._lock:
            now = time.monotonic()
            lost = [rank for rank, (at, _, _) in self._gone.items() if now - at > OUTLIVED_S]
            for rank in lost:
                _, step, event = self._gone.pop(rank)
                self.lost.append(event.words)
                row = {"step": step, "time_ns": time.time_ns(), **event.columns()}
                self.open().append("events", {name: [value] for name, value in row.items()}, rank=rank)

    def done(self, pid: int) -> None:
        """Nothing more comes from that process."""
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
    """One process's share of a trace. Counts what it writes; `on_jump` is told when a logged mismatch jumps."""

    def __init__(self, trace: RunTrace, pid: int, on_jump: Callable[[str], None] | None = None) -> None:
        self.rank = 0
        self.n_batches = 0
        self.n_rows = 0
        self.last_step: int | None = None
        self._trace = trace
        self._pid = pid
        self._wanted = 0
        self._facts: dict[str, Any] = {}
        self._on_jump = on_jump
        self._mismatch = MismatchWatch()
        self._opened = False
        self._lock = threading.Lock()

    @property
    def lost_ranks(self) -> list[str]:
        """In words, those of the run that others have outlived."""
        return self._trace.lost

    def claim_rank(self, wanted: int) -> None:
        """Before the first row. Taken with it: a process that is refused takes no number from the others."""
        self._wanted = wanted

    def _claim(self) -> None:
        self.rank = self._trace.claim(self._pid, self._wanted)

    def update_run(self, **fields: Any) -> None:
        """Facts of this process for `run.json`; kept until it is attached."""
        with self._lock:
            self._facts.update(fields)
            if self._opened:
                self._trace.set_rank(self.rank, self._facts)

    def open(self) -> None:
        """The process is attached: it has its place in the trace."""
        self._claim()
        with self._lock:
            self._opened = True
            self._trace.set_rank(self.rank, self._facts)
        self._trace.open()

    def write(self, frame: Frame) -> None:
        """Append a `batch` frame; durable when it returns. TraceError if the disk or the rows do not allow it."""
        self._claim()
        table, columns = str(frame["table"]), dict(frame["columns"])
        if table == "signals":
            columns = dict(canonicalize(columns))
            if self._on_jump is not None and (jump := self._mismatch.see(columns)):
                self._on_jump(jump)
        try:
            self._trace.open().append(table, columns, rank=self.rank)
            self._trace.tell_gone()
        except KeyError as error:
            raise TraceError(f"a batch lacks {error}", cause="an agent of another version") from None
        self.n_batches += 1
        self.n_rows += len(next(iter(columns.values()), ()))
        steps = columns.get("step")
        if steps:
            self.last_step = max(self.last_step or 0, max(steps))

    def end(self, reason: str) -> None:
        """Say why it ended, if it had begun; once."""
        if self._opened and "ended" not in self._facts:
            try:
                self.update_run(ended={"reason": reason, "time_ns": time.time_ns()})
                self._trace.tell_gone()
                if reason in ("agent_lost", "target_exited"):
                    data = {"pid": self._pid, "reason": reason}
                    event = Event(RANK_LOST, f"rank {self.rank}", "ended", data)
                    self._trace.gone(self.rank, -1 if self.last_step is None else self.last_step, event)
            finally:  # the others of the run wait for it, whatever the disk says
                self._trace.done(self._pid)
