"""Rows of one table, read piece by piece and again at each pass, so that a page of a long run fits in memory."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mxprobe.trace import Trace
from mxprobe.trace.chunks import chunks
from mxprobe.trace.column_arrays import Array, Indices


class Rows:
    """A table of a trace. `read` yields its pieces, `pa.Table`s with the columns asked for and `rank`."""

    def __init__(self, read: Callable[[Collection[str]], Iterator[Any]]) -> None:
        self._read = read

    @classmethod
    def of_trace(cls, trace: Trace, table: str, steps: Sequence[range] | None = None) -> "Rows":
        """Read a table of a trace; with `steps`, only rows of these."""
        return cls(lambda columns: chunks(trace.directory, table, columns, steps=steps))

    def chunks(self, columns: Collection[str]) -> Iterator[Any]:
        """Yield pieces with `columns` and `rank`, none of them empty."""
        return self._read(columns)


def all_finite(values: Array) -> npt.NDArray[np.bool_]:
    """Return (n,) whether each of the (columns, n) is finite: a sum is, where its terms are."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.isfinite(np.ones(len(values)) @ values)


def add_by(totals: npt.NDArray[Any], keys: Indices, values: npt.NDArray[Any]) -> None:
    """Do totals[:, keys[i]] += values[:, i] for (columns, n) values; quicker than `np.add.at` for many columns."""
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


def ratio(above: Array, below: Array) -> Array:
    """Return above / below, NaN where the second is not positive."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
