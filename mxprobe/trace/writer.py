"""The one writer of a trace: every appended batch is on disk, whole, before `append` returns."""

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from mxprobe._version import __version__
from mxprobe.errors import TraceError
from mxprobe.schema import SCHEMA_MINOR, SCHEMA_VERSION

from . import layout
from .arrow import columns_of, live_schema
from .compaction import compact_live
from .compactor import Compactor
from .object_store import Mirror
from .retention import FAILURES, LIVE_SHARE, Retention, RetentionEnforcer

ROTATE_BYTES = 64 * 1024 * 1024
"""A live file of this size becomes a Parquet part, some five times smaller, and the next one is begun."""
_MAX_BACKLOG = 4
"""Full live files that wait to become parts. Beyond it rows wait, too: they are on disk, only the answer is late."""


class TraceWriter:
    """Writes one trace directory. Safe to share between threads.

    A batch is one Arrow IPC message handed to the kernel in one `write`, so killing any process loses nothing
    that `append` returned for. (Only a crash of the machine can: live files are not fsynced per batch.)

    Args:
        directory: created if missing; other files in it are left alone.
        run: facts about the run for `run.json`, any JSON values.
        rotate_bytes: size at which a live file becomes a Parquet part.
        retention: how much stays at full resolution; `run.json` says what was added up, as `thinned`.
        mirror: is told of new parts, and finished with the trace.

    Raises:
        TraceError: the directory already holds a trace, or cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        run: Mapping[str, Any],
        *,
        rotate_bytes: int = ROTATE_BYTES,
        retention: Retention | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            taken = layout.looks_like_trace(self.directory)
            lock = None if taken else layout.lock_writer(self.directory)
        except OSError as error:
            raise TraceError(
                f"cannot write a trace to {self.directory}: {error.strerror or error}",
                cause="missing permission, a full disk, or a file of that name",
                remedy="choose another directory with -o",
            ) from None
        if lock is None:
            raise TraceError(
                f"{self.directory} already holds a trace",
                cause="an earlier or a still running attach wrote there",
                remedy="choose another directory with -o, or remove that one",
            )
        self._lock_descriptor = lock
        self._mirror = mirror
        self._mutex = threading.Condition()
        self._rotate_bytes = rotate_bytes
        self._retention = retention or Retention()
        self._enforcer = None
        if self._retention != Retention():
            self._enforcer = RetentionEnforcer(
                self.directory, self._retention, lambda windows: self.update_run(thinned=windows)
            )
        self._compactor = Compactor(self.directory, self._enforcer, self._compacted)
        limit = self._retention.max_bytes
        self._max_live_bytes = None if limit is None else int(LIVE_SHARE * limit)
        self._max_backlog_bytes = _MAX_BACKLOG * rotate_bytes if limit is None else int(LIVE_SHARE * limit)
        self._backlog_bytes = 0
        self._live_bytes: dict[tuple[str, int], int] = {}
        self._files: dict[tuple[str, int], int] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._closed = False
        self._run: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "schema_minor": SCHEMA_MINOR,
            "mxprobe": __version__,
            "writer_pid": os.getpid(),
            "created_ns": time.time_ns(),
            "closed_ns": None,
            **run,
        }
        layout.write_json(self.directory / layout.RUN_FILE, self._run)

    def append(self, table: str, columns: Mapping[str, Sequence[Any]], *, rank: int = 0) -> None:
        """Write rows, given by column; columns left out are null. Durable against `kill -9` when it returns.

        Raises:
            TraceError: unknown table or column, columns of unequal length, values of the wrong type, or a disk
                that takes no more (the rows before it stay readable).
        """
        batch = _to_batch(table, columns)
        if batch.num_rows == 0:
            return
        with self._mutex:
            if self._closed:
                raise TraceError(f"the trace {self.directory} is closed", cause="rows came after close()")
            descriptor = self._files.get((table, rank))
            if descriptor is None:
                descriptor = self._files[table, rank] = self._open(table, rank)
            self._write(descriptor, batch.serialize(), table)
            if os.fstat(descriptor).st_nlink == 0:  # a write into a file that was removed succeeds, and is lost
                raise self._vanished()
            size = self._live_bytes[table, rank] = os.lseek(descriptor, 0, os.SEEK_CUR)
            if self._enforcer is not None:
                self._enforcer.observe(table, columns.get("step", ()), time.monotonic())
            if size >= self._rotate_bytes:
                self._rotate(table, rank)
            elif self._max_live_bytes is not None and sum(self._live_bytes.values()) > self._max_live_bytes:
                self._rotate(*max(self._live_bytes, key=self._live_bytes.__getitem__))
            self._mutex.wait_for(lambda: self._backlog_bytes <= self._max_backlog_bytes)

    def settle(self) -> None:
        """Wait until the files that were full have become parts, or could not."""
        with self._mutex:
            self._mutex.wait_for(lambda: self._backlog_bytes == 0)

    def update_run(self, **fields: Any) -> None:
        """Set fields of `run.json`; the file is replaced at once. TraceError if the disk takes no more."""
        with self._mutex:
            self._run.update(fields)
            try:
                layout.write_json(self.directory / layout.RUN_FILE, self._run)
            except OSError as error:
                raise self._refused(f"cannot write {layout.RUN_FILE}", error) from None

    def close(self) -> None:
        """Compact the live files to Parquet, remove them, mark the trace complete. A second call does nothing.

        What the retention no longer keeps is added up, too.

        Raises:
            TraceError: the disk takes no more; what is not compacted stays in the live files. Or the mirror could not
                be finished, which takes nothing from the trace.
        """
        with self._mutex:
            if self._closed:
                return
            self._stop()
        self._compactor.finish()
        with self._mutex:
            if self._compactor.unexpected is not None:
                self._run["compaction_error"] = repr(self._compactor.unexpected)
            try:
                compact_live(self.directory)
                self._keep_at_last()
                self._run["closed_ns"] = time.time_ns()
                layout.write_json(self.directory / layout.RUN_FILE, self._run)
            except OSError as error:
                raise self._refused("cannot turn the live files into Parquet", error) from None
            finally:
                os.close(self._lock_descriptor)
        if self._mirror is not None:
            self._mirror.finish()

    def abandon(self) -> None:
        """Stop writing and leave the trace open-ended, as if the process had died: readable, not complete."""
        with self._mutex:
            if self._closed:
                return
            self._stop()
        self._compactor.finish()
        os.close(self._lock_descriptor)

    def _stop(self) -> None:
        self._closed = True
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _vanished(self) -> TraceError:
        return TraceError(
            f"{self.directory} is no longer there",
            cause="it was removed or replaced while it was written to",
            remedy="attach again, with another directory; what was recorded went with it",
        )

    def _refused(self, what: str, error: OSError) -> TraceError:
        return TraceError(
            f"{self.directory}: {what}: {error.strerror or error}",
            cause="the disk or the quota is full",
            remedy="free some space; every row written before is readable in the live files, as they are",
        )

    def _rotate(self, table: str, rank: int) -> None:
        os.close(self._files.pop((table, rank)))
        number = self._numbers.get((table, rank), 0)
        self._numbers[table, rank] = number + 1
        size = self._live_bytes.pop((table, rank))
        self._backlog_bytes += size
        path = layout.live_path(self.directory, table, rank, number)
        self._compactor.hand_over(layout.LiveFile(table, rank, number, path), size)

    def _compacted(self, size_bytes: int) -> None:
        with self._mutex:
            self._backlog_bytes -= size_bytes
            self._mutex.notify_all()
        if self._mirror is not None:
            self._mirror.poke()

    def _keep_at_last(self) -> None:
        """Enforce the retention after the last part, and note by how much the parts are too large."""
        if self._enforcer is None:
            return
        try:
            self._enforcer.enforce(time.monotonic())
        except FAILURES:
            pass
        except Exception as error:  # every row is where it was, and the trace is complete
            self._run["compaction_error"] = repr(error)
        if self._enforcer.excess_bytes:
            self._run["excess_bytes"] = self._enforcer.excess_bytes

    def _open(self, table: str, rank: int) -> int:
        path = layout.live_path(self.directory, table, rank, self._numbers.get((table, rank), 0))
        if not (self.directory / layout.RUN_FILE).exists():
            raise self._vanished()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._refused(f"cannot begin table {table}", error) from None
        self._write(descriptor, live_schema(table).serialize(), table)
        return descriptor

    def _write(self, descriptor: int, message: Any, table: str) -> None:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        left = memoryview(message).cast("B")
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            # A torn batch in the middle would hide every batch after it from readers.
            with contextlib.suppress(OSError):  # a disk that takes nothing at all: readers stop at the torn one
                os.ftruncate(descriptor, start)
                os.lseek(descriptor, start, os.SEEK_SET)
            raise TraceError(
                f"cannot write to table {table} of {self.directory}: {error.strerror or error}",
                cause="the disk or the quota is full",
                remedy="free some space; what was written before is readable",
            ) from None


def _to_batch(table: str, columns: Mapping[str, Sequence[Any]]) -> Any:
    known = columns_of(table)
    unknown = sorted(set(columns) - set(known))
    if unknown:
        raise TraceError(
            f"table {table} has no column {', '.join(map(repr, unknown))}",
            cause="rows made by another version of mxprobe",
            remedy="use the same version in the target and in the controller",
        )
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise TraceError(f"table {table}: columns of unequal length {lengths}", cause="a bug in what made the rows")
    n_rows = next(iter(lengths.values()), 0)
    schema = live_schema(table)
    arrays: list[Any] = []
    for field in schema:
        if field.name not in columns:
            arrays.append(pa.nulls(n_rows, field.type))
            continue
        try:
            arrays.append(pa.array(columns[field.name], type=field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
            raise TraceError(
                f"table {table}, column {field.name}: {error}", cause="a value that is not of the column's type"
            ) from None
    return pa.record_batch(arrays, schema=schema)
