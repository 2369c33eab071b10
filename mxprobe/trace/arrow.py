"""Arrow schemas, made from the type names of `mxprobe.schema`.

Two spellings of each table: `live_schema` holds names as plain strings, so that every record batch stands
alone and a stream cut anywhere loses only its tail; `table_schema` dictionary-encodes them, for Parquet and
for frames.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mxprobe.errors import TraceError
from mxprobe.tables import SPAN, TABLES, THINNED

from .event_facts import with_facts

_SCALARS: dict[str, Callable[[], Any]] = {
    "int64": pa.int64,
    "int32": pa.int32,
    "float64": pa.float64,
    "bool": pa.bool_,
    "string": pa.string,
}
_SPAN = frozenset(name for name, _ in SPAN)
_LIST = re.compile(r"list<int64(?::(\d+))?>")

UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""Arrow and Parquet raise these on bytes that are not theirs."""


ROWS_PER_PIECE = 65_536
"""Rows of a row group of a part, and of what is read of a live file at a time."""


def damaged(path: Path, error: Exception) -> TraceError:
    """Return the error for a file that cannot be read."""
    return TraceError(
        f"cannot read {path}: {error}",
        cause="the file is damaged or was copied in part",
        remedy="copy the trace again; the other tables are not affected",
    )


def check_readable(data: Any) -> None:
    """Follow every offset and decode every name of a table or batch once, so that later use cannot stumble.

    Raises:
        one of `UNREADABLE`.
    """
    data.validate(full=True)
    _ = data.schema.names


def columns_of(table: str) -> dict[str, str]:
    """Return column name -> type name of a table. TraceError when the schema has no such table."""
    if table not in TABLES:
        raise TraceError(
            f"no table named {table!r} in a trace",
            cause="a typing error, or rows made by another version of mxprobe",
            remedy=f"use one of: {', '.join(TABLES)}",
        )
    return dict((*TABLES[table], *(SPAN if table in THINNED else ())))


def arrow_type(name: str, *, dictionary: bool) -> Any:
    """Return the Arrow type of a type name; `dict` becomes a dictionary of strings or, without, plain strings."""
    if name == "dict":
        return pa.dictionary(pa.int32(), pa.string()) if dictionary else pa.string()
    if name in _SCALARS:
        return _SCALARS[name]()
    match = _LIST.fullmatch(name)
    if match is None:
        raise ValueError(f"unknown type name {name!r} in mxprobe.schema")
    return pa.list_(pa.int64(), int(match[1])) if match[1] else pa.list_(pa.int64())


@cache
def live_schema(table: str) -> Any:
    """Return the schema of `live/rank=R/<table>.arrows`."""
    return pa.schema([(name, arrow_type(kind, dictionary=False)) for name, kind in columns_of(table).items()])


@cache
def table_schema(table: str) -> Any:
    """Return the schema of `<table>/rank=R/part-*.parquet` and of the frames."""
    return pa.schema([(name, arrow_type(kind, dictionary=True)) for name, kind in columns_of(table).items()])


def select(schema: Any, columns: Collection[str] | None) -> Any:
    """Return the schema reduced to the named columns; the whole of it for None."""
    return schema if columns is None else pa.schema([field for field in schema if field.name in columns])


def _span(field: Any, data: Any) -> Any:
    """Return the column `n_steps` or `last_step`; rows that were never added up have 1 and their own step."""
    own = data.column("step") if "step" in data.column_names else pa.nulls(data.num_rows, field.type)
    own = pa.array(np.ones(data.num_rows, dtype=np.int64)) if field.name == "n_steps" else own.cast(field.type)
    if field.name not in data.column_names:
        return own
    column = data.column(field.name).cast(field.type)
    if not column.null_count:
        return column
    given = np.asarray(column.is_valid())
    chosen = np.where(given, np.asarray(column.fill_null(0)), np.asarray(own.fill_null(0)))
    return pa.array(chosen, mask=~given & np.asarray(own.is_null()))


def conform(data: Any, table: str, columns: Collection[str] | None = None) -> Any:
    """Cast a `pa.Table` of any version to this version's columns: missing ones null, unknown ones dropped.

    With `columns`, only those, in the schema's order.

    Raises:
        TraceError: a column holds another type than the schema says.
    """
    schema = select(table_schema(table), columns)
    arrays: list[Any] = []
    for field in schema:
        if field.name in _SPAN:
            arrays.append(_span(field, data))
            continue
        if field.name not in data.column_names:
            arrays.append(pa.nulls(data.num_rows, field.type))
            continue
        column = data.column(field.name)
        try:
            if pa.types.is_dictionary(field.type) and not pa.types.is_dictionary(column.type):
                column = column.cast(pa.string()).dictionary_encode()
            arrays.append(column if column.type == field.type else column.cast(field.type))
        except (pa.ArrowException, ValueError) as error:
            raise TraceError(
                f"table {table}: column {field.name} holds {column.type}, not {field.type} ({error})",
                cause="the file was written by something else than mxprobe",
                remedy="read the Parquet files directly, or make the trace again",
            ) from None
    whole = pa.table(arrays, schema=schema)
    return with_facts(whole) if table == "events" else whole


def gathered(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of neighbouring record batches or tables, often of one row, with some `ROWS_PER_PIECE` rows each."""
    pending: list[Any] = []
    n_rows = 0
    for item in items:
        pending.append(item)
        n_rows += item.num_rows
        if n_rows >= ROWS_PER_PIECE:
            yield pending
            pending, n_rows = [], 0
    if n_rows:
        yield pending


def pieces(table: str, batches: Iterable[Any], columns: Collection[str] | None = None) -> Iterator[Any]:
    """Yield record batches as `conform`ed tables of some `ROWS_PER_PIECE` rows."""
    return (conform(pa.Table.from_batches(each), table, columns) for each in gathered(batches))
