"""Rows into batches: columns by table, sent together. Used by one thread at a time."""

from __future__ import annotations

from typing import Any

from mxprobe.agent.transport import Transport
from mxprobe.events import finished
from mxprobe.schema import Row
from mxprobe.tables import TABLES

MAX_ROWS = 2000
"""Rows of one batch: a few megabytes of JSON, so that one batch is never a noticeable write."""


WHOLE = {"placement": "", "n_edge_blocks": 0}
"""Of a row that says nothing of its part of a GEMM."""


class Recorder:
    def __init__(self, transport: Transport) -> None:
        self.step_base = 0
        """Optimizer steps that the run had taken before attach; written by a job that comes first. Rows come with the
        steps since attach, and leave with those of the run."""
        self._transport = transport
        self._rows: dict[str, list[Row]] = {}

    def add(self, table: str, row: Row) -> None:
        """Keep a row until `flush`. KeyError at `flush` where a column of the schema is missing."""
        self.add_absolute(table, finished(row, self.step_base))

    def add_absolute(self, table: str, row: Row) -> None:
        """Keep a row whose step is the run's own count already."""
        self._rows.setdefault(table, []).append(row)

    def flush(self) -> None:
        """Send what is held, one batch per table (more where there are very many rows)."""
        held, self._rows = self._rows, {}
        for table, rows in held.items():
            for start in range(0, len(rows), MAX_ROWS):
                self._transport.batch(table, to_columns(table, rows[start : start + MAX_ROWS]))


def to_columns(table: str, rows: list[Row]) -> dict[str, list[Any]]:
    """Rows -> {column: values} in the order of the schema. KeyError where a row lacks a column."""
    return {
        name: [row.get(name, WHOLE[name]) if name in WHOLE else row[name] for row in rows] for name, _ in TABLES[table]
    }
