"""Tables as CSV, JSON or Parquet: every row and every column, one file per table, beside a copy of run.json.

CSV    lists as JSON text, missing values empty; names as text
JSON   an array with one object per line; what is missing or not finite is null
Parquet  one file per table, zstd, names dictionary-encoded; `rank` is a column
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from mxprobe.attribution.ratios import output_ratios, tensor_ratios
from mxprobe.errors import UsageError
from mxprobe.tables import TABLES
from mxprobe.trace import Trace
from mxprobe.trace.layout import RUN_FILE, write_json

_BATCH_ROWS = 16_384


class FileFormat(StrEnum):
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def export_files(
    trace: Trace,
    directory: Path,
    format: FileFormat,
    *,
    tables: Sequence[str] = (),
    with_ratios: bool = False,
    overwrite: bool = False,
) -> Iterator[Path]:
    """Write the tables that have rows (or those named) and yield each file once it is whole.

    Args:
        tables: names of `mxprobe.tables.TABLES`; all if none are given.
        with_ratios: append the derived ratios to `tensors` (NMSE, remainder split, output error, ...).
        overwrite: replace files that are there.

    Raises:
        UsageError: unknown table, a file is there already, or the directory cannot be written.
        TraceError: a table cannot be read.
    """
    for name in tables:
        if name not in TABLES:
            raise UsageError(f"a trace has no table {name!r}", remedy=f"use: {', '.join(TABLES)}")
    chosen = list(tables) or list(TABLES)
    paths = {name: directory / f"{name}.{format}" for name in chosen}
    run_copy = directory / RUN_FILE
    if run_copy.resolve() == (trace.directory / RUN_FILE).resolve():
        raise UsageError(f"{directory} is the trace itself", remedy="name another directory with -o")
    taken = [path for path in (*paths.values(), run_copy) if path.exists()]
    if taken and not overwrite:
        raise UsageError(f"{taken[0]} exists already", remedy="name another directory with -o, or pass --overwrite")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            table = trace.arrow(name)
            if table.num_rows == 0 and not tables:
                continue
            if with_ratios and name == "tensors" and table.num_rows:
                table = _with_ratios(table)
            temporary = path.with_name(f".{path.name}.tmp")
            _WRITERS[format](table, temporary)
            os.replace(temporary, path)
            yield path
        write_json(run_copy, trace.run)
        yield run_copy
    except OSError as error:
        raise UsageError(
            f"cannot write to {directory}: {error.strerror or error}",
            cause="a missing permission, a full disk, or a file of that name",
            remedy="name another directory with -o",
        ) from None


def _with_ratios(table: Any) -> Any:
    """Append derived columns behind the stored ones, row by row."""
    numeric = [
        field.name for field in table.schema if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
    ]
    sums = table.select(numeric).to_pandas()
    for ratios in (tensor_ratios(sums), output_ratios(sums)):
        for name in ratios.columns:
            table = table.append_column(name, pa.array(ratios[name].to_numpy(dtype=float), from_pandas=True))
    return table


def _write_csv(table: Any, path: Path) -> None:
    columns: list[Any] = []
    for field in table.schema:
        column = table.column(field.name)
        if pa.types.is_dictionary(field.type):
            column = column.cast(pa.string())
        elif pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type):
            texts = [
                None if value is None else json.dumps(value, separators=(",", ":")) for value in column.to_pylist()
            ]
            column = pa.array(texts, pa.string())
        columns.append(column)
    pyarrow.csv.write_csv(pa.table(columns, names=table.column_names), path)


def _write_json(table: Any, path: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write("[")
        separator = "\n"
        for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
            for row in batch.to_pylist():
                finite = {
                    name: None if isinstance(value, float) and not math.isfinite(value) else value
                    for name, value in row.items()
                }
                file.write(separator + json.dumps(finite, separators=(",", ":"), allow_nan=False))
                separator = ",\n"
        file.write("\n]\n")


_WRITERS: dict[FileFormat, Callable[[Any, Path], None]] = {
    FileFormat.CSV: _write_csv,
    FileFormat.JSON: _write_json,
    FileFormat.PARQUET: partial(pyarrow.parquet.write_table, compression="zstd"),
}
