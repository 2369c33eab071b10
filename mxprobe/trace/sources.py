"""The files that hold a table, each row once, kept open against a writer that removes them meanwhile."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mxprobe.errors import TraceError

from . import layout
from .arrow import UNREADABLE, check_readable, conform, damaged
from .live_stream import LiveStream

_TRIES = 8
_MAX_HELD = 512
"""Parts kept open: a process may have some thousand files."""


class Source:
    """A Parquet part, or a live file that no part holds yet.

    Raises:
        FileNotFoundError: removed since it was listed, from the constructor.
    """

    def __init__(self, path: Path, rank: int, *, is_live: bool, hold: bool) -> None:
        self.path = path
        self.rank = rank
        self.is_live = is_live
        self._file = pa.OSFile(str(path), "rb") if hold else None

    def stream(self) -> LiveStream:
        """Of a live file."""
        return LiveStream(self.path, self._file)

    def parquet(self) -> Any:
        """`pq.ParquetFile` of a part. TraceError if it is damaged."""
        try:
            file = pq.ParquetFile(self.path if self._file is None else self._file)
            _ = file.schema_arrow.names  # decoded here, where it may fail
            return file
        except UNREADABLE as error:
            raise damaged(self.path, error) from None

    def n_rows(self) -> int:
        """A part's from its footer. TraceError if it is damaged."""
        if self.is_live:
            return sum(batch.num_rows for batch in self.stream())
        return self.parquet().metadata.num_rows

    def rows(self, table: str) -> Iterator[Any]:
        """Row groups of a part as `pa.Table`s of this version's columns. TraceError if it is damaged."""
        file = self.parquet()
        for group in range(file.num_row_groups):
            try:
                data = file.read_row_group(group)
                check_readable(data)
            except UNREADABLE as error:
                raise damaged(self.path, error) from None
            yield conform(data, table)


def sources(directory: Path, table: str) -> list[Source]:
    """Parts by rank and number, then live files. Of a trace that is being written, open: they may be gone soon."""
    hold = layout.has_live_writer(directory)
    for _ in range(_TRIES):
        try:
            live = list(_live_sources(directory, table, hold=hold))
            parts = layout.part_files(directory, table)  # after the live files: these become parts, never the reverse
            live = [(file, source) for file, source in live if not layout.is_held(file, parts)]
            if hold and layout.has_gap([file for file, _ in live], parts):
                continue  # listed while parts were put together
            hold_parts = hold and len(parts) <= _MAX_HELD
            return [
                *(Source(part.path, part.rank, is_live=False, hold=hold_parts) for part in parts),
                *(source for _, source in live),
            ]
        except FileNotFoundError:
            continue  # put together with others
        except OSError as error:
            raise damaged(directory / table, error) from None
    raise TraceError(
        f"table {table} of {directory} is not whole: a file between others is missing",
        cause="it was removed or not copied, or files change faster than they can be listed",
        remedy="copy the trace again; or detach, and read it then",
    )


def _live_sources(directory: Path, table: str, *, hold: bool) -> Iterator[tuple[layout.LiveFile, Source]]:
    for file in layout.live_files(directory):
        if file.table == table:
            with contextlib.suppress(FileNotFoundError):  # a part by now
                yield file, Source(file.path, file.rank, is_live=True, hold=hold)


def part_sources(directory: Path, table: str) -> Iterator[Source]:
    return (source for source in sources(directory, table) if not source.is_live)
