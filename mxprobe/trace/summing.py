"""An aggregation over a whole table, by the engine that was asked for."""

from pathlib import Path

import pandas as pd

from mxprobe.errors import UsageError
from mxprobe.schema import ENGINES

from .aggregation import Aggregation, combined, framed, partial_of
from .sources import sources


def aggregate(directory: Path, aggregation: Aggregation, engine: str = "arrow") -> pd.DataFrame:
    """Return columns `by` (names as categories), `sums` as float64, and `n_rows`, in the order of the keys.

    Raises:
        TraceError: a file is damaged.
        UsageError: the engine is unknown or not installed.
    """
    if engine == "duckdb":
        from .duckdb_engine import aggregate_in_duckdb

        found = aggregate_in_duckdb(directory, aggregation)
    elif engine == "ray":
        from .ray_engine import partials_on_ray

        found = combined(partials_on_ray(directory, aggregation), aggregation)
    elif engine == "arrow":
        found = combined((partial_of(each, aggregation) for each in sources(directory, aggregation.table)), aggregation)
    else:
        raise UsageError(f"no engine named {engine!r}", remedy=f"use one of: {', '.join(ENGINES)}")
    return framed(found, aggregation)
