"""A table of a trace piece by piece, so that memory does not grow with the length of the run."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .sources import group_steps, part_sources, sources


def chunks(
    directory: Path, table: str, columns: Collection[str], *, steps: Sequence[range] | None = None
) -> Iterator[Any]:
    """Yield `pa.Table`s with `columns` (as in the schema) and `rank`, none empty, in the order of parts and batches.

    With `steps`, only rows whose step lies in one of the ranges, which are taken as closed intervals of step 1.

    Raises:
        TraceError: a file is damaged, or holds another type than the schema says.
    """
    wanted = {*columns, "step"} if steps is not None else set(columns)
    for source in sources(directory, table):
        for piece in source.pieces(table, wanted, steps):
            rows = piece if steps is None else _of_steps(piece, steps)
            if rows.num_rows:
                yield with_rank(rows, source.rank)


def with_rank(rows: Any, rank: int) -> Any:
    """The `pa.Table` with a column `rank`."""
    return rows.append_column("rank", pa.array(np.full(rows.num_rows, rank, dtype=np.int32)))


def count_rows(directory: Path, table: str) -> int:
    """Count the rows of a table's Parquet parts, from their footers. Live files are left out."""
    return sum(source.n_rows() for source in part_sources(directory, table))


def step_ranges(directory: Path, table: str) -> list[range]:
    """First to last step of each row group, by rank and part; groups without statistics are left out."""
    files = (source.parquet() for source in part_sources(directory, table))
    found = (group_steps(file, group) for file in files for group in range(file.num_row_groups))
    return [range(bounds[0], bounds[1] + 1) for bounds in found if bounds is not None]


def _of_steps(rows: Any, steps: Sequence[range]) -> Any:
    step = rows.column("step").to_numpy()
    inside = np.zeros(rows.num_rows, dtype=np.bool_)
    for each in steps:
        inside |= (step >= each.start) & (step < each.stop)
    return rows.filter(pa.array(inside))
