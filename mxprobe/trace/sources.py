"""The files that hold a table, each row once, kept open against a writer that removes them meanwhile."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mxprobe.errors import TraceError

from . import layout
from .arrow import UNREADABLE, check_readable, conform, damaged, pieces
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
        self.cut_after: int | None = None
        """Batches of a live file before bytes that cannot be read; known once its pieces have been read."""

    def parquet(self) -> Any:
        """Open a part as `pq.ParquetFile`. TraceError if it is damaged."""
        try:
            file = pq.ParquetFile(self.path if self._file is None else self._file)
            _ = file.schema_arrow.names  # decoded here, where it may fail
            return file
        except UNREADABLE as error:
            raise damaged(self.path, error) from None

    def n_rows(self) -> int:
        """Count the rows; those of a part are in its footer. TraceError if it is damaged."""
        if self.is_live:
            return sum(batch.num_rows for batch in LiveStream(self.path, self._file))
        return self.parquet().metadata.num_rows

    def pieces(
        self, table: str, columns: Collection[str] | None = None, steps: Sequence[range] | None = None
    ) -> Iterator[Any]:
        """Yield `pa.Table`s of this version's columns, or of those named, each a row group or as many live batches.

        With `steps`, row groups that hold none of them by their statistics are left out. TraceError if it is damaged.
        """
        if self.is_live:
            stream = LiveStream(self.path, self._file)
            yield from pieces(table, stream, columns)
            self.cut_after = stream.n_batches if stream.is_cut else None
            return
        file = self.parquet()
        present = [name for name in file.schema_arrow.names if columns is None or name in columns]
        wanted = [group for group in range(file.num_row_groups) if _may_hold(steps, group_steps(file, group))]
        # The next group is decoded while the caller works on this one: both take as long, and neither holds the GIL.
        with ThreadPoolExecutor(max_workers=1) as ahead:
            pending = [ahead.submit(file.read_row_group, group, present) for group in wanted[:1]]
            for following in [*wanted[1:], None]:
                if not pending:
                    return
                try:
                    data = pending.pop().result()
                    check_readable(data)
                except UNREADABLE as error:
                    raise damaged(self.path, error) from None
                if following is not None:
                    pending.append(ahead.submit(file.read_row_group, following, present))
                yield conform(data, table, columns)


def group_steps(file: Any, group: int) -> tuple[int, int] | None:
    """Return least and largest step of a row group by its statistics; None where it has none."""
    metadata = file.metadata.row_group(group)
    with contextlib.suppress(*UNREADABLE):  # reading the group will say what is wrong with it
        for index in range(metadata.num_columns):
            column = metadata.column(index)
            if column.path_in_schema == "step" and column.statistics is not None and column.statistics.has_min_max:
                return int(column.statistics.min), int(column.statistics.max)
    return None


def _may_hold(steps: Sequence[range] | None, bounds: tuple[int, int] | None) -> bool:
    """Return whether a row group may hold one of the steps; without statistics it may."""
    if steps is None or bounds is None:
        return True
    return any(each.start <= bounds[1] and bounds[0] < each.stop for each in steps)


def sources(directory: Path, table: str) -> list[Source]:
    """List the parts by rank and number, then the live files.

    In a trace that is being written they are opened at once, since they may be gone soon.
    """
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
