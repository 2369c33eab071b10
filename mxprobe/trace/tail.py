"""Rows of a trace as they are written: each poll reads only the bytes that were added since the last one."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from . import layout
from .arrow import UNREADABLE, conform, damaged
from .run_file import read_run

_MAX_BYTES_PER_POLL = 32 * 1024 * 1024
"""A long trace is caught up with in several polls, so that the view stays responsive."""


@dataclass
class _Position:
    """How far a table of one rank has been read: rows, and bytes where it was live, of the file of that number."""

    number: int = 0
    n_rows: int = 0
    offset: int = 0
    schema: Any = None


class TraceTail:
    """Follows the live files of a trace, and its Parquet parts once the writer compacts them.

    Raises:
        TraceError: no readable trace, from the constructor; a damaged file, from `poll`.
    """

    def __init__(self, directory: Path, columns: dict[str, Sequence[str]]) -> None:
        self.directory = directory
        self.run, self.problems = read_run(directory)
        self.is_behind = False
        """The last poll left rows that were there: it had read enough, or a file became another meanwhile."""
        self._columns = columns
        self._positions: dict[tuple[str, int], _Position] = {}
        self._run_stamp = self._stamp()

    def poll(self) -> list[tuple[str, int, pd.DataFrame]]:
        """Read (table, rank, new rows) with the columns asked for. Incomplete batches are left for the next poll."""
        found: list[tuple[str, int, pd.DataFrame]] = []
        self.is_behind = False
        for table in self._columns:
            live, parts = layout.fresh_live_files(self.directory, table)
            for rank, of_rank in groupby(parts, key=lambda part: part.rank):
                found.extend(self._frames(table, rank, self._read_parts(table, rank, list(of_rank))))
            for file in live:
                if self.is_behind:
                    break  # a later file of the same rank is read after this one
                found.extend(self._frames(table, file.rank, self._read_live(file)))
        if self._stamp() != self._run_stamp:
            self.run, self.problems = read_run(self.directory)
            self._run_stamp = self._stamp()
        return found

    def follow(self, interval_s: float) -> Iterator[list[tuple[str, int, pd.DataFrame]]]:
        """Yield each poll that found rows, and [] whenever all that was there has been read, until the writer is gone.

        Waits `interval_s` after each [] but the last.
        """
        while True:
            is_open = self.state == "recording"  # before the polls: what was written until then is read
            while rows := self.poll():
                yield rows
            yield []
            if not is_open:
                return
            time.sleep(interval_s)

    @property
    def state(self) -> str:
        """`recording`, `closed`, or `writer died`."""
        if self.run.get("closed_ns") is not None:
            return "closed"
        return "recording" if layout.has_live_writer(self.directory) else "writer died"

    def _frames(self, table: str, rank: int, rows: Iterator[Any]) -> Iterator[tuple[str, int, pd.DataFrame]]:
        pieces = list(rows)
        if pieces:
            data = conform(pa.concat_tables(pieces), table).select(list(self._columns[table]))
            yield table, rank, data.to_pandas()

    def _read_live(self, file: layout.LiveFile) -> Iterator[Any]:
        position = self._positions.setdefault((file.table, file.rank), _Position())
        if file.number < position.number:
            return  # read to its end; its part is late because the disk was full
        if file.number > position.number:
            position = self._positions[file.table, file.rank] = _Position(file.number)
        try:
            with open(file.path, "rb") as stream:
                stream.seek(position.offset)
                data = stream.read(_MAX_BYTES_PER_POLL)
                self.is_behind |= len(data) == _MAX_BYTES_PER_POLL
        except FileNotFoundError:  # it became a part meanwhile: later files wait until that has been read
            self.is_behind = True
            return
        source = pa.BufferReader(data)
        end = 0
        while True:
            try:
                message = pa.ipc.read_message(source)
            except (EOFError, pa.ArrowInvalid, OSError):
                break
            end = source.tell()
            if message.type == "schema":
                position.schema = pa.ipc.read_schema(message)
            elif message.type == "record batch":
                batch = pa.ipc.read_record_batch(message, position.schema)
                position.n_rows += batch.num_rows
                yield pa.Table.from_batches([batch])
        position.offset += end

    def _read_parts(self, table: str, rank: int, parts: Sequence[layout.PartFile]) -> Iterator[Any]:
        """Yield the rows of the parts beyond those read live; a part holds the rows of its live file in their order."""
        position = self._positions.setdefault((table, rank), _Position())
        for part in parts:
            if part.last < position.number:
                continue
            # Put together with one of which rows were shown: its others, long past, are left out.
            is_mixed = part.first < position.number or (position.n_rows > 0 and part.first < part.last)
            if not is_mixed:
                try:
                    data = pq.ParquetFile(part.path).read(columns=list(self._columns[table])).slice(position.n_rows)
                except FileNotFoundError:  # put together with others meanwhile
                    self.is_behind = True
                    return
                except UNREADABLE as error:
                    raise damaged(part.path, error) from None
                if data.num_rows:
                    yield data
            self._positions[table, rank] = position = _Position(part.last + 1)

    def _stamp(self) -> int:
        try:
            return (self.directory / layout.RUN_FILE).stat().st_mtime_ns
        except OSError:
            return 0
