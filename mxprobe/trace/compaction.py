"""Live Arrow streams -> Parquet parts, so that a crash at any moment neither loses nor doubles a row.

A part holds one live file, whole. It is written under a dot-name, fsynced and renamed; the live file goes last.
A reader that finds both reads the part. Parts that hold several come of `mxprobe.trace.retention`, the same way.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mxprobe.errors import TraceError

from . import arrow, layout
from .arrow import columns_of, pieces, table_schema
from .live_stream import LiveStream
from .thinning import Windows

MAX_PART_BYTES = 64 * 1024 * 1024
"""Of parts that are put together."""


def compact(directory: Path | str) -> None:
    """Finish a trace whose writer died: live files become Parquet, `run.json` says so.

    Raises:
        TraceError: not a trace, or its writer is still alive.
    """
    from .reader import read_run  # these import this module
    from .retention import Keeper, Retention

    directory = Path(directory)
    run, problems = read_run(directory)
    lock = layout.lock_writer(directory)
    if lock is None:
        raise TraceError(
            f"{directory} is still being written",
            cause=f"process {run.get('writer_pid', 'unknown')} holds it",
            remedy="detach first, or read it as it is: readers see every acknowledged row",
        )
    try:
        compact_live(directory)
        windows = Windows.from_json(run.get("thinned"))
        if windows is not None:
            Keeper(directory, Retention(), lambda _: None).apply(windows)
        if run.get("closed_ns") is None and not problems:
            layout.write_json(directory / layout.RUN_FILE, {**run, "compacted_after_death": True})
    finally:
        os.close(lock)


def compact_live(directory: Path) -> None:
    """Turn every live file into a Parquet part and remove it. The caller holds the writer's lock."""
    for file in layout.live_files(directory):
        compact_file(directory, file)
    for folder in (directory / layout.LIVE_DIRECTORY).glob("rank=*"):
        if not any(folder.iterdir()):
            folder.rmdir()
    live = directory / layout.LIVE_DIRECTORY
    if live.is_dir() and not any(live.iterdir()):
        live.rmdir()


def compact_file(directory: Path, file: layout.LiveFile) -> None:
    """Turn one live file, which nobody writes any more, into its part and remove it.

    Raises:
        OSError: the disk takes no more; the live file is as it was.
    """
    if layout.is_held(file, layout.part_files(directory, file.table, file.rank)):
        file.path.unlink()
        return
    stream = LiveStream(file.path)
    part = layout.part_path(directory, file.table, file.rank, file.number)
    write_part(part, file.table, pieces(file.table, stream))
    if stream.is_cut:
        file.path.replace(file.path.with_suffix(".cut"))  # what cannot be read is kept for whoever can
    else:
        file.path.unlink()


def write_part(final: Path, table: str, tables: Iterable[Any]) -> None:
    """Write `pa.Table`s of the table's schema as a part, which takes its name when it is whole.

    Raises:
        OSError: the disk takes no more; there is no part.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.tmp")
    kinds = columns_of(table)
    # ParquetWriter's typing asks for a bool where it takes a list of columns.
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": [name for name, kind in kinds.items() if kind == "dict"],
        "use_byte_stream_split": [name for name, kind in kinds.items() if kind == "float64"],
    }
    pending: list[Any] = []
    n_pending = 0
    with layout.removed_on_error(temporary):
        with open(layout.fresh(temporary), "wb") as file:
            with pq.ParquetWriter(file, table_schema(table), **options) as writer:
                for piece in tables:
                    pending.append(piece)
                    n_pending += piece.num_rows
                    if n_pending >= arrow.ROWS_PER_PIECE:
                        writer.write_table(pa.concat_tables(pending).unify_dictionaries())
                        pending, n_pending = [], 0
                if n_pending:
                    writer.write_table(pa.concat_tables(pending).unify_dictionaries())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    _sync_directory(final.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
