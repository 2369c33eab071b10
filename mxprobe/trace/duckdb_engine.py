"""Aggregations in DuckDB, over the Parquet parts of a trace as they are; live files go in as Arrow."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from mxprobe.errors import UsageError

from .aggregation import BIN, COUNT, Aggregation
from .arrow import conform, damaged
from .chunks import with_rank
from .sources import Source, sources


def aggregate_in_duckdb(directory: Path, aggregation: Aggregation) -> Any:
    """Sum as `mxprobe.trace.summing.aggregate` does; the rows are unordered. UsageError if duckdb is not installed."""
    try:
        import duckdb
    except ImportError:
        raise UsageError("the engine duckdb is not installed", remedy="pip install 'mxprobe[duckdb]'") from None
    files = sources(directory, aggregation.table)
    parts = [source for source in files if not source.is_live]
    live = [_live_rows(source, aggregation) for source in files if source.is_live]
    connection = duckdb.connect()
    try:
        connection.execute("SET preserve_insertion_order = false")
        froms = [f"SELECT * FROM ({_of_parts(parts, aggregation)})"] if parts else []
        if live:
            connection.register("live", pa.concat_tables(live).unify_dictionaries())
            froms.append(f"SELECT {_columns(aggregation, {*aggregation.columns, 'rank'})} FROM live")
        if not froms:
            return aggregation.arrow_schema.empty_table()
        if aggregation.bins is not None:
            steps = sorted(aggregation.bins)
            bins = {
                "step": pa.array(steps, pa.int64()),
                BIN: pa.array([aggregation.bins[s] for s in steps], pa.int64()),
            }
            connection.register("bins", pa.table(bins))
        found = connection.sql(_sql(" UNION ALL ".join(froms), aggregation)).to_arrow_table()
        return found.cast(aggregation.arrow_schema)
    except duckdb.Error as error:
        raise damaged(directory / aggregation.table, error) from None
    finally:
        connection.close()


def _sql(rows: str, aggregation: Aggregation) -> str:
    finite = (f'sum("{name}") FILTER (WHERE isfinite("{name}")) AS "{name}"' for name in aggregation.sums)
    keys = [f'"{name}"' for name in aggregation.by]
    conditions = (
        f'"{name}" IN ({", ".join(_literal(value) for value in values)})' for name, values in aggregation.where.items()
    )
    join = " JOIN bins USING (step)" if aggregation.bins is not None else ""
    where = " AND ".join(conditions)
    return (
        f"SELECT {', '.join([*keys, *finite, f'count(*) AS {COUNT}'])} FROM ({rows}){join}"
        + (f" WHERE {where}" if where else "")
        + (f" GROUP BY {', '.join(keys)}" if keys else " HAVING count(*) > 0")
    )


def _of_parts(parts: list[Source], aggregation: Aggregation) -> str:
    present: set[str] = {"rank"}
    for part in parts:
        present |= set(part.parquet().schema_arrow.names)
    # The rank by rank, not from the path: a directory above the trace may be called `step=77`, too.
    options = "hive_partitioning = false, union_by_name = true"
    by_rank = " UNION ALL BY NAME ".join(
        f"SELECT *, {rank} AS rank FROM read_parquet([{_paths(parts, rank)}], {options})"
        for rank in sorted({part.rank for part in parts})
    )
    return f"SELECT {_columns(aggregation, present)} FROM ({by_rank})"


def _paths(parts: list[Source], rank: int) -> str:
    return ", ".join(_literal(str(part.path)) for part in parts if part.rank == rank)


def _columns(aggregation: Aggregation, present: set[str]) -> str:
    """Columns in a fixed order and type; what no file has is null."""
    kinds = aggregation.arrow_schema
    selected: list[str] = []
    for name in (*aggregation.columns, "rank"):
        kind = "DOUBLE" if name in aggregation.sums else "VARCHAR"
        if name in ("step", "rank") or (name in kinds.names and pa.types.is_integer(kinds.field(name).type)):
            kind = "BIGINT"
        selected.append(
            f'CAST("{name}" AS {kind}) AS "{name}"' if name in present else f'CAST(NULL AS {kind}) AS "{name}"'
        )
    return ", ".join(selected)


def _live_rows(source: Source, aggregation: Aggregation) -> Any:
    columns = aggregation.columns
    empty = conform(pa.table({}), aggregation.table, columns)
    return with_rank(pa.concat_tables([empty, *source.pieces(aggregation.table, columns)]), source.rank)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
