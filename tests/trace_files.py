"""Believable traces on disk, written by the real writer from the frames of `report_frames`."""

from pathlib import Path
from typing import Any

import pandas as pd

from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter
from tests import report_frames

FRAMES = ("tensors", "outputs", "whatif", "signals", "events", "modules", "overhead")


def frames(
    n_layers: int = 1, n_steps: int = 120, every: int = 10, **overrides: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """All tables of a run, by name; `overrides` replace some."""
    return report_frames.tables(n_layers, n_steps, every, **overrides)


def append(writer: TraceWriter, tables: dict[str, pd.DataFrame]) -> None:
    for name, rows in tables.items():
        if len(rows):
            columns = {column: rows[column].tolist() for column, _ in TABLES[name]}
            if name == "modules":  # report_frames leaves shapes out
                columns["shape"] = [list(shape) if shape else [64, 64] for shape in columns["shape"]]
            writer.append(name, columns)


def write_trace(
    directory: Path, tables: dict[str, pd.DataFrame], *, run: dict[str, Any] | None = None, close: bool = True
) -> Path:
    """A trace of these tables; with `close=False` as a writer that was killed leaves it."""
    import os

    writer = TraceWriter(directory, run or report_frames.inputs(1).run)
    append(writer, tables)
    if close:
        writer.close()
    else:
        os.close(writer._lock_descriptor)  # pyright: ignore[reportPrivateUsage]
    return directory
