"""Rows of one table, read piece by piece and again at each pass, so that a page of a long run fits in memory."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from mxprobe.trace import Trace
from mxprobe.trace.arrow import conform
from mxprobe.trace.chunks import chunks
from mxprobe.trace.column_arrays import Array as Array
from mxprobe.trace.column_arrays import Indices as Indices
from mxprobe.trace.column_arrays import codes as codes
from mxprobe.trace.column_arrays import names_of as names_of
from mxprobe.trace.column_arrays import numbers as numbers


class Rows:
    """A table of a trace, or of a frame with the trace's columns. Pieces are `pa.Table`s."""

    def __init__(self, read: Callable[[Collection[str]], Iterator[Any]]) -> None:
        self._read = read

    @classmethod
    def of_trace(cls, trace: Trace, table: str, steps: Sequence[range] | None = None) -> "Rows":
        """With `steps`, only rows of these."""
        return cls(lambda columns: chunks(trace.directory, table, columns, steps=steps))

    @classmethod
    def of_frame(cls, table: str, frame: pd.DataFrame) -> "Rows":
        return cls(lambda columns: _pieces_of_frame(table, frame, columns))

    def chunks(self, columns: Collection[str]) -> Iterator[Any]:
        """Pieces with `columns` and `rank`, none of them empty."""
        return self._read(columns)


def _pieces_of_frame(table: str, frame: pd.DataFrame, columns: Collection[str]) -> Iterator[Any]:
    if frame.empty:
        return
    present = frame[[name for name in frame.columns if name in columns]]
    data = conform(pa.Table.from_pandas(present, preserve_index=False), table, columns)
    yield data.append_column("rank", pa.array(frame["rank"].to_numpy().astype(np.int32)))


def all_finite(values: Array) -> npt.NDArray[np.bool_]:
    """(n,) whether each of the (columns, n) is finite: a sum is, where its terms are."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.isfinite(np.ones(len(values)) @ values)


def add_by(totals: npt.NDArray[Any], keys: Indices, values: npt.NDArray[Any]) -> None:
    """totals[:, keys[i]] += values[:, i] for (columns, n) values; quicker than `np.add.at` for many columns."""
    if not keys.size:
        return
    if totals.dtype == np.float64 and totals.shape[1] <= 2 * keys.size:
        for total, row in zip(totals, values, strict=True):
            total += np.bincount(keys, weights=row, minlength=totals.shape[1])
        return
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    totals[:, ordered[starts]] += np.add.reduceat(values[:, order], starts, axis=1)
