"""Sums over a table by keys: what all analyses of large tables are made of, written once and run by any engine.

    partial(rows) -> sums per key of some rows;  partial(partial(a) + partial(b)) = partial(a + b)

`arrow` goes through the trace piece by piece in this process, `ray` does the same part by part on a cluster (identical
to the last bit: the same partial sums, added in the same order), `duckdb` states it in SQL (the same to rounding).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from .arrow import columns_of
from .chunks import with_rank
from .column_arrays import codes
from .sources import Source

BIN = "step_bin"
COUNT = "n_rows"


@dataclass(frozen=True)
class Aggregation:
    """Sums of finite values, null where a group has none, and the number of rows; by names, `step`, `rank` or `BIN`."""

    table: str
    by: tuple[str, ...]
    sums: tuple[str, ...] = ()
    where: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Column of names -> those that count."""
    bins: Mapping[int, int] | None = None
    """Step -> its bin, for `by` with `BIN`; rows of other steps do not count."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table that are read."""
        keys = ("step" if name == BIN else name for name in self.by if name != "rank")
        return tuple(dict.fromkeys((*keys, *self.where, *self.sums)))

    @property
    def arrow_schema(self) -> Any:
        kinds = columns_of(self.table)
        keys = [
            (name, pa.int64() if kinds.get(name, "int64") in ("int64", "int32") else pa.string()) for name in self.by
        ]
        return pa.schema([*keys, *((name, pa.float64()) for name in self.sums), (COUNT, pa.int64())])


def framed(sums: Any, aggregation: Aggregation) -> pd.DataFrame:
    """Return a frame in the order of the keys, names as categories."""
    table = sums.sort_by([(name, "ascending") for name in aggregation.by]) if aggregation.by else sums
    names = [field.name for field in table.schema if pa.types.is_string(field.type)]
    return table.to_pandas().astype(dict.fromkeys(names, "category"))


def partial_of(source: Source, aggregation: Aggregation) -> Any:
    """Return the sums over one file, added piece by piece."""
    pieces = source.pieces(aggregation.table, aggregation.columns)
    return combined((partial(with_rank(piece, source.rank), aggregation) for piece in pieces), aggregation)


def partial(rows: Any, aggregation: Aggregation) -> Any:
    """Return the sums over some rows of the table."""
    wanted = np.ones(rows.num_rows, dtype=np.bool_)
    for name, values in aggregation.where.items():
        wanted &= codes(rows, name, dict.fromkeys(values, 0)) >= 0
    keys: dict[str, Any] = {}
    if BIN in aggregation.by:
        steps, bins = _bin_arrays(aggregation)
        step = rows.column("step").fill_null(-1).to_numpy()
        position = np.minimum(np.searchsorted(steps, step), max(steps.size - 1, 0))
        wanted &= (steps[position] == step) if steps.size else False
        keys[BIN] = pa.array(bins[position] if steps.size else np.zeros(rows.num_rows, dtype=np.int64))
    for name in aggregation.by:
        if name != BIN:
            keys[name] = rows.column(name)
    values = {name: _finite(rows.column(name)) for name in aggregation.sums}
    counted = pa.array(np.ones(rows.num_rows, dtype=np.int64))
    table = pa.table({**{name: keys[name] for name in aggregation.by}, **values, COUNT: counted})
    return _summed(table if wanted.all() else table.filter(pa.array(wanted)), aggregation)


def combined(partials: Iterable[Any], aggregation: Aggregation) -> Any:
    """Add several partial sums in their order."""
    found = [each for each in partials if each.num_rows]
    if not found:
        return aggregation.arrow_schema.empty_table()
    return found[0] if len(found) == 1 else _summed(pa.concat_tables(found), aggregation)


def _summed(table: Any, aggregation: Aggregation) -> Any:
    table = table.unify_dictionaries().combine_chunks()
    names = [*aggregation.sums, COUNT]
    if not aggregation.by:
        table, by = table.append_column("all", pa.array(np.zeros(table.num_rows, dtype=np.int64))), ["all"]
    else:
        by = list(aggregation.by)
    grouped = table.group_by(by, use_threads=False).aggregate([(name, "sum") for name in names])
    arrays = {name: grouped.column(name) for name in aggregation.by}
    arrays |= {name: grouped.column(f"{name}_sum") for name in names}
    return pa.table(arrays).cast(aggregation.arrow_schema)


def _finite(column: Any) -> Any:
    values = column.to_numpy().astype(np.float64)
    return pa.array(values, mask=~np.isfinite(values))


def _bin_arrays(aggregation: Aggregation) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    bins = aggregation.bins or {}
    steps = np.array(sorted(bins), dtype=np.int64)
    return steps, np.array([bins[int(step)] for step in steps], dtype=np.int64)
