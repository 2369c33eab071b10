"""Adds up old steps of a table, so that a long trace stays small and its totals stay the same.

    row of a window = sum over its steps of the rows of the same operand        sums, counts, histograms
                      largest: `amax`, times, counters since attach; least: `sampled_frac`, `micro_step`, `from_step`

What names a row is never mixed: a module that changed its recipe within a window keeps a row for each. A missing value
adds nothing, as everywhere; rows with an infinity are added up among themselves.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from .arrow import columns_of, table_schema

Steps = npt.NDArray[np.int64]

_LARGEST = frozenset({"time_ns", "amax", "n_dropped", "n_errors", "sent_bytes", "last_step"})
_LEAST = frozenset({"micro_step", "sampled_frac", "from_step", "rank_output_error", "rank_zeroed"})
_NAMES = frozenset({"weight_lag", "expert", "top_k", "probe"})  # numbers that name, beside all names and truth values
_NONE = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Windows:
    """The steps before `until`, cut at `starts` [windows], ascending. Earlier steps than the first are left alone."""

    starts: Steps
    until: int

    def first_of(self, steps: Steps) -> Steps:
        """Return the step that stands for each step: its window's first, or itself."""
        if not self.starts.size:
            return steps
        index = np.searchsorted(self.starts, steps, side="right") - 1
        return np.where((index >= 0) & (steps < self.until), self.starts[index], steps)

    def agrees(self, other: "Windows", first: int, last: int) -> bool:
        """Return whether both do the same to the steps from `first` to `last`; `first` must stand for itself in one."""
        if first >= max(self.until, other.until):
            return True
        mine, theirs = (each.starts[(each.starts >= first) & (each.starts <= last)] for each in (self, other))
        ends = (min(each.until, last + 1) for each in (self, other))
        return np.array_equal(mine, theirs) and next(ends) == next(ends)

    def to_json(self) -> dict[str, Any]:
        return {"starts": self.starts.tolist(), "until": self.until}

    @classmethod
    def from_json(cls, data: Any) -> "Windows | None":
        """Read what `to_json` gives; None for anything else."""
        if not isinstance(data, dict) or not isinstance(data.get("until"), int):
            return None
        starts = data.get("starts")
        if not isinstance(starts, list) or not all(isinstance(each, int) for each in starts):
            return None
        return cls(np.sort(np.array(starts, dtype=np.int64)), data["until"])


def thinned(table: str, pieces: Iterable[Any], windows: Windows) -> Iterator[Any]:
    """Yield the rows of `pieces` (`pa.Table`s as `conform` gives, of one rank) with old steps added up.

    Rows of a window that lie far apart may stay several: the sums over them are the same.
    """
    held: Any = None
    for piece in pieces:
        rows = add_up(table, piece if held is None else pa.concat_tables([held, piece]), windows)
        step = rows.column("step").fill_null(_NONE).to_numpy()
        newest = step.max() if step.size else _NONE
        open_window = (step == newest) & (step < windows.until)  # the next piece may go on with it
        held = rows.filter(pa.array(open_window))
        yield rows.filter(pa.array(~open_window))
    if held is not None:
        yield held


def add_up(table: str, rows: Any, windows: Windows) -> Any:
    """Return one row per window and name for the steps before `windows.until`, and the other rows as they were."""
    rows = rows.unify_dictionaries().combine_chunks()
    step = rows.column("step").fill_null(_NONE).to_numpy()
    first = windows.first_of(step)
    is_old = (step != _NONE) & (step < windows.until) & (first >= windows.starts.min(initial=windows.until))
    if not is_old.any():
        return rows
    old = rows.filter(pa.array(is_old)).combine_chunks()
    added = _grouped(table, old, first[is_old])
    return added if is_old.all() else pa.concat_tables([added, rows.filter(pa.array(~is_old))])


def _grouped(table: str, rows: Any, first: Steps) -> Any:
    kinds = columns_of(table)
    names = [name for name, kind in kinds.items() if kind in ("dict", "string", "bool") or name in _NAMES]
    codes = {name: _codes(rows.column(name)) for name in names}
    frame = pd.DataFrame({"step": first, "infinite": _infinite(rows, kinds), **codes})
    group = frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order], prepend=-1))
    columns: list[Any] = []
    for field in table_schema(table):
        column = rows.column(field.name)
        if field.name == "step":
            columns.append(pa.array(first[order[bounds]]))
        elif field.name in codes:
            columns.append(column.take(pa.array(order[bounds])))
        elif pa.types.is_fixed_size_list(field.type):
            columns.append(_summed_lists(column, order, bounds))
        else:
            columns.append(_reduced(field.name, column, order, bounds))
    return pa.table(columns, schema=table_schema(table))


def _codes(column: Any) -> Any:
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        return values.indices.fill_null(-1).to_numpy()
    if pa.types.is_string(values.type):
        return values.dictionary_encode().indices.fill_null(-1).to_numpy()
    return values.cast(pa.int64()).fill_null(_NONE).to_numpy()


def _infinite(rows: Any, kinds: dict[str, str]) -> npt.NDArray[np.bool_]:
    found = np.zeros(rows.num_rows, dtype=np.bool_)
    for name, kind in kinds.items():
        if kind == "float64":
            found |= np.isinf(rows.column(name).to_numpy())
    return found


def _reduced(name: str, column: Any, order: Steps, bounds: Steps) -> Any:
    """Return sum, maximum or minimum of each group; null where all of a group are missing."""
    reduce, nothing = np.add.reduceat, 0
    is_float = pa.types.is_floating(column.type)
    if name in _LARGEST:
        reduce, nothing = np.maximum.reduceat, -np.inf if is_float else _NONE
    elif name in _LEAST:
        reduce, nothing = np.minimum.reduceat, np.inf if is_float else np.iinfo(np.int64).max
    if is_float:
        values = column.to_numpy()
        known = ~np.isnan(values)
    else:
        known = column.is_valid().to_numpy()
        values = column.cast(pa.int64()).fill_null(0).to_numpy()
    reduced = reduce(np.where(known, values, nothing)[order], bounds)
    missing = ~np.logical_or.reduceat(known[order], bounds)
    reduced = np.where(missing, 0, reduced)
    return pa.array(reduced, mask=missing).cast(column.type)


def _summed_lists(column: Any, order: Steps, bounds: Steps) -> Any:
    values = column.combine_chunks()
    width = values.type.list_size
    flat = values.values.slice(values.offset * width, len(values) * width).fill_null(0).to_numpy()
    known = values.is_valid().to_numpy(zero_copy_only=False)
    table = np.where(known[:, None], flat.reshape(-1, width), 0)
    summed = np.add.reduceat(table[order], bounds, axis=0)
    missing = ~np.logical_or.reduceat(known[order], bounds)
    return pa.FixedSizeListArray.from_arrays(pa.array(summed.ravel()), width, mask=pa.array(missing))
