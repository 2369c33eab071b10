"""A table of a trace piece by piece, so that memory does not grow with the length of the run.

A piece is a row group of a Parquet part or as many batches of a live file. What is read of a part is cut by the
statistics of its `step` column before anything is decoded.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .arrow import UNREADABLE, check_readable, conform, damaged, pieces
from .sources import Source, part_sources, sources


def chunks(
    directory: Path, table: str, columns: Collection[str], *, steps: Sequence[range] | None = None
) -> Iterator[Any]:
    """Yields `pa.Table`s with `columns` (as in the schema) and `rank`, in the order of parts and batches.

    With `steps`, only rows whose step lies in one of the ranges, which are taken as closed intervals of step 1.

    Raises:
        TraceError: a file is damaged, or holds another type than the schema says.
    """
    wanted = {*columns, "step"} if steps is not None else set(columns)
    for source in sources(directory, table):
        yield from source_chunks(source, table, wanted, steps)


def source_chunks(source: Source, table: str, columns: set[str], steps: Sequence[range] | None = None) -> Iterator[Any]:
    """The same of one file."""
    if source.is_live:
        for piece in pieces(table, source.stream(), columns):
            yield from _finished(piece, source.rank, steps)
    else:
        yield from _of_part(source, table, columns, steps)


def count_rows(directory: Path, table: str) -> int:
    """Rows of a table's Parquet parts, from their footers. Live files are not counted."""
    return sum(source.n_rows() for source in part_sources(directory, table))


def step_ranges(directory: Path, table: str) -> list[range]:
    """First to last step of each row group, by rank and part; groups without statistics are left out."""
    found: list[range] = []
    for source in part_sources(directory, table):
        file = source.parquet()
        for group in range(file.num_row_groups):
            bounds = group_steps(file, group)
            if bounds is not None:
                found.append(range(bounds[0], bounds[1] + 1))
    return found


def _of_part(source: Source, table: str, columns: set[str], steps: Sequence[range] | None) -> Iterator[Any]:
    file = source.parquet()
    present = [name for name in file.schema_arrow.names if name in columns]
    wanted = [group for group in range(file.num_row_groups) if _has_steps(group_steps(file, group), steps)]
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
                raise damaged(source.path, error) from None
            if following is not None:
                pending.append(ahead.submit(file.read_row_group, following, present))
            yield from _finished(conform(data, table, columns), source.rank, steps)


def _has_steps(bounds: tuple[int, int] | None, steps: Sequence[range] | None) -> bool:
    """Whether a row group may hold one of the steps; without statistics it may."""
    if steps is None or bounds is None:
        return True
    return any(each.start <= bounds[1] and bounds[0] < each.stop for each in steps)


def _finished(data: Any, rank: int, steps: Sequence[range] | None) -> Iterator[Any]:
    if steps is not None:
        step = data.column("step").to_numpy()
        inside = np.zeros(data.num_rows, dtype=np.bool_)
        for each in steps:
            inside |= (step >= each.start) & (step < each.stop)
        data = data.filter(pa.array(inside))
    if data.num_rows:
        yield data.append_column("rank", pa.array(np.full(data.num_rows, rank, dtype=np.int32)))


def group_steps(file: Any, group: int) -> tuple[int, int] | None:
    """Least and largest step of a row group by its statistics; None where there are none to be had."""
    metadata = file.metadata.row_group(group)
    with contextlib.suppress(*UNREADABLE):  # reading the group will say what is wrong with it
        for index in range(metadata.num_columns):
            column = metadata.column(index)
            if column.path_in_schema == "step" and column.statistics is not None and column.statistics.has_min_max:
                return int(column.statistics.min), int(column.statistics.max)
    return None
