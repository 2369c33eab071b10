"""Live Arrow streams -> Parquet parts, so that a crash at any moment neither loses nor doubles a row.

A part holds one live file, whole. It is written under a dot-name, fsynced and renamed; the live file goes last.
A reader that finds both reads the part. `mxprobe.trace.retention` writes parts that hold several live files, the same
way.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import layout
from .arrow import columns_of, gathered, pieces, table_schema
from .live_stream import LiveStream


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
    if layout.is_held(file, layout.part_files(directory, file.table)):
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
    kinds = columns_of(table)
    # ParquetWriter's typing asks for a bool where it takes a list of columns.
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": [name for name, kind in kinds.items() if kind == "dict"],
        "use_byte_stream_split": [name for name, kind in kinds.items() if kind == "float64"],
    }
    with layout.replacing(final) as file, pq.ParquetWriter(file, table_schema(table), **options) as writer:
        for rows in gathered(tables):
            writer.write_table(pa.concat_tables(rows).unify_dictionaries())
    _sync_directory(final.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
