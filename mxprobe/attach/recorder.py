"""What the controller writes: the trace's tables and its `run.json`. Opened with the first thing worth keeping."""

import threading
import time
from pathlib import Path
from typing import Any

from mxprobe.errors import TraceError, UsageError
from mxprobe.metrics import canonicalize
from mxprobe.protocol import Frame
from mxprobe.trace import TraceWriter
from mxprobe.trace.layout import looks_like_trace


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


class TraceRecorder:
    """Counts what it writes. A refused attach never opens the trace, and so leaves no directory behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rank = 0
        self.n_batches = 0
        self.n_rows = 0
        self.last_step: int | None = None
        self._writer: TraceWriter | None = None
        self._run: dict[str, Any] = {}
        self._lock = threading.Lock()

    def update_run(self, **fields: Any) -> None:
        """Fields of `run.json`; kept until the trace is open."""
        with self._lock:
            self._run.update(fields)
            if self._writer is not None:
                self._writer.update_run(**fields)

    def open(self) -> TraceWriter:
        with self._lock:
            if self._writer is None:
                self._writer = TraceWriter(self.directory, self._run)
            return self._writer

    def write(self, frame: Frame) -> None:
        """Append a `batch` frame; durable when it returns. TraceError if the disk or the rows do not allow it."""
        table, columns = str(frame["table"]), dict(frame["columns"])
        if table == "signals":
            columns = dict(canonicalize(columns))
        try:
            self.open().append(table, columns, rank=self.rank)
        except KeyError as error:
            raise TraceError(f"a batch lacks {error}", cause="an agent of another version") from None
        self.n_batches += 1
        self.n_rows += len(next(iter(columns.values()), ()))
        steps = columns.get("step")
        if steps:
            self.last_step = max(self.last_step or 0, max(steps))

    def close(self, reason: str) -> bool:
        """Say why it ended and compact; False if nothing is open."""
        writer = self._writer
        if writer is None:
            return False
        self.update_run(ended={"reason": reason, "time_ns": time.time_ns()})
        self._writer = None
        writer.close()
        return True
