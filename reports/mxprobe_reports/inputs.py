"""What a report is made of: the tables of a trace, its run, its problems and the recommendation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mxprobe.attribution import Recommendation
from mxprobe.attribution.mixture import Mixture
from mxprobe.trace import Trace
from mxprobe.trace.chunks import count_rows, step_ranges

from .rows import Rows

MAX_ROWS = {"tensors": 5_000_000, "whatif": 50_000_000, "outputs": 5_000_000, "gradients": 10_000_000}
"""Rows read of a table for one page; of longer tables, evenly spaced windows of steps."""


@dataclass(frozen=True)
class Inputs:
    """The large tables as `Rows`; the others as frames with the columns of `mxprobe.tables.TABLES`."""

    name: str
    recommendation: Recommendation
    run: Mapping[str, Any]
    problems: Sequence[str]
    tensors: Rows
    outputs: Rows
    whatif: Rows
    gradients: Rows
    sensitivity: pd.DataFrame
    replays: pd.DataFrame
    rollouts: pd.DataFrame
    signals: pd.DataFrame
    events: pd.DataFrame
    modules: pd.DataFrame
    overhead: pd.DataFrame
    mixture: Mixture | None
    """Of experts and routers."""

    @classmethod
    def from_trace(cls, trace: Trace, recommendation: Recommendation) -> "Inputs":
        steps, notices = windows(trace.directory)
        return cls(
            name=_name(trace.directory.resolve()),
            recommendation=recommendation,
            run=trace.run,
            problems=[*trace.problems, *notices],
            tensors=Rows.of_trace(trace, "tensors", steps),
            outputs=Rows.of_trace(trace, "outputs", steps),
            whatif=Rows.of_trace(trace, "whatif", steps),
            gradients=Rows.of_trace(trace, "gradients", steps),
            sensitivity=trace.sensitivity(),
            replays=trace.replays(),
            rollouts=trace.rollouts(),
            signals=trace.signals(),
            events=trace.events(),
            modules=trace.modules(),
            overhead=trace.overhead(),
            mixture=Mixture.of(trace),
        )


def windows(directory: Path) -> tuple[list[range] | None, list[str]]:
    """Return which steps to read of a trace beyond `MAX_ROWS`, and the sentence that says so; None for all of them.

    A window is a row group of the tensors table: some steps in a row, as they were written.
    """
    counted = {table: count_rows(directory, table) for table in MAX_ROWS}
    excess = max(rows / MAX_ROWS[table] for table, rows in counted.items())
    groups = sorted(step_ranges(directory, "tensors"), key=lambda each: each.start)
    if excess <= 1 or len(groups) < 2:
        return None, []
    n_kept = max(int(len(groups) / excess), 1)
    kept = [groups[i * len(groups) // n_kept] for i in range(n_kept)]
    total = sum(counted.values())
    return kept, [
        f"The trace is long ({total:,} rows): errors, what-ifs and layer outputs on this page are of {n_kept} of its "
        f"{len(groups)} windows of steps, evenly spaced. The verdict and the signals use all."
    ]


def _name(directory: Path) -> str:
    """Return the directory's name, with its parent's where the name alone says nothing."""
    return f"{directory.parent.name}/{directory.name}" if directory.stem == "trace" else directory.name
