"""Open a trace, finished, live or torn, and hand out its tables as pandas frames."""

import html
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from mxprobe.errors import TraceError
from mxprobe.tables import TABLES

from . import layout
from .aggregation import Aggregation
from .arrow import select, table_schema
from .chunks import chunks, with_rank
from .name_conflicts import apart, conflicting
from .object_store import fetch, url_of
from .run_file import read_run
from .sources import sources
from .summing import aggregate
from .thinning import Windows


def open_trace(path: Path | str, *, engine: str = "arrow") -> "Trace":
    """Open the trace directory at `path`, or at a URL that fsspec knows (`s3://...`). Tables are read on first use.

    `engine` is what large tables are summed with: see `mxprobe.schema.ENGINES`.

    Raises:
        TraceError: no such directory, not a trace, one that only a newer mxprobe can read, or a store out of reach.
    """
    url = url_of(path)
    trace = Trace(Path(path) if url is None else fetch(url))
    trace.url = url
    trace.engine = engine
    return trace


class Trace:
    """A run's trace. Frames have the columns of `mxprobe.tables.TABLES` and a `rank`.

    Names (`module`, `role`, ...) are pandas categories; a column with missing integers is float with NaN.
    `problems` lists in sentences what is wrong with it, `is_complete` whether its writer closed it.
    """

    axis = "step"
    """The column `step` counts optimizer steps, unless this is another view of a trace."""

    engine = "arrow"
    """`sums` runs on it."""
    url: str | None = None
    """The directory was copied from there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run, self._problems = read_run(directory)
        self.is_live = layout.has_live_writer(directory)
        """True if a process was writing the trace when it was opened."""
        self._frames: dict[str, pd.DataFrame] = {}
        self._cuts: dict[str, str] = {}

    def tensors(self) -> pd.DataFrame:
        """Decomposition sums per step, module, role and phase."""
        return self.table("tensors")

    def outputs(self) -> pd.DataFrame:
        """Realised and predicted output error per step, module and phase, with the inferred recipe."""
        return self.table("outputs")

    def whatif(self) -> pd.DataFrame:
        """Error left by each correction per step, module, role and phase."""
        return self.table("whatif")

    def gradients(self) -> pd.DataFrame:
        """Error of the weight gradient and of dX per step, module, GEMM and component."""
        return self.table("gradients")

    def sensitivity(self) -> pd.DataFrame:
        """Sums behind Delta2 (predicted KL) per replayed step, module, role and component."""
        return self.table("sensitivity")

    def replays(self) -> pd.DataFrame:
        """Counterfactual forwards per replayed step and arm."""
        return self.table("replays")

    def rollouts(self) -> pd.DataFrame:
        """Log-probabilities of sampled tokens by rollout and trainer, per probed step and stratum."""
        return self.table("rollouts")

    def layers(self) -> pd.DataFrame:
        """Differences of the residual stream per step, block and comparison."""
        return self.table("layers")

    def signals(self) -> pd.DataFrame:
        """The metrics the framework logged, by canonical name."""
        return self.table("signals")

    def events(self) -> pd.DataFrame:
        """Events: attached, detached, errors, first non-finite values."""
        return self.table("events")

    def modules(self) -> pd.DataFrame:
        """One row per module and rank, the last one written; what was not probed, and why, included."""
        rows = self.table("modules")
        return rows.drop_duplicates(["rank", "module"], keep="last").reset_index(drop=True)

    def overhead(self) -> pd.DataFrame:
        """Step and probe time per optimizer step."""
        return self.table("overhead")

    def table(self, name: str, columns: Collection[str] | None = None) -> pd.DataFrame:
        """Return the rows of a table by its name; an empty frame with all columns when there are none.

        With `columns` only those and `rank` are read: histograms are most of a large `tensors` table.
        """
        if name in self._frames:
            whole = self._frames[name]
            return whole.copy() if columns is None else whole[[c for c in whole if c in columns or c == "rank"]].copy()
        frame = self.arrow(name, columns).to_pandas()
        if columns is not None:
            return frame
        self._frames[name] = frame
        return frame.copy()

    @property
    def is_complete(self) -> bool:
        """True once the writer has closed the trace, which then is all in Parquet."""
        return self.run.get("closed_ns") is not None

    @property
    def place(self) -> Path:
        """The path beside which reports and exports go; in the working directory where the trace has a URL."""
        return self.directory.resolve() if self.url is None else Path.cwd() / self.directory.name

    @property
    def problems(self) -> list[str]:
        """Say in sentences what a reader must know before trusting the numbers. Reads the live files."""
        found = list(self._problems)
        if self.is_live:
            found.append(f"The trace is still being written, by process {self.run.get('writer_pid', 'unknown')}.")
        elif self.run.get("copied_while_written"):
            found.append("The trace was still being written when this was copied; rows that were live are missing.")
        elif not self.is_complete and (self.run or layout.live_files(self.directory)):
            found.append(f"The writer died before closing the trace; {self._last_row()}.")
        for table in {file.table for file in layout.live_files(self.directory)}:
            self.table(table, (TABLES[table][0][0],))  # says what is cut
        windows = Windows.from_json(self.run.get("thinned"))
        if windows is not None:
            found.append(
                f"Steps before {windows.until} are kept as sums of several steps, in {windows.starts.size} windows "
                "(--keep, --max-trace): their totals are those of every step; what happened within a window is lost."
            )
        by_node = self.run.get("thinned_by_node")
        for node, told in sorted(by_node.items()) if isinstance(by_node, dict) else ():
            if (windows := Windows.from_json(told)) is not None:
                found.append(
                    f"Of the ranks of node {node}, steps before {windows.until} are kept as sums of several steps, in "
                    f"{windows.starts.size} windows (--keep, --max-trace): what happened within a window is lost."
                )
        excess = self.run.get("excess_bytes")
        if excess:
            found.append(
                f"The trace takes {excess:,} bytes more than --max-trace allowed: the newest step and tables "
                "that hold no sums are kept as they are."
            )
        if self.run.get("compaction_error"):
            found.append(f"Adding up old steps failed ({self.run['compaction_error']}); no row is lost.")
        found.extend(self._cuts[table] for table in sorted(self._cuts))
        found.extend(
            f"{path.relative_to(self.directory)} holds what could not be read of a live file when it became Parquet."
            for path in layout.cut_files(self.directory)
        )
        found.extend(
            f"{name} is not one module: ranks call modules of different class or size so, and their rows are not added."
            for name in sorted(self._conflicts)
        )
        if not any(self._n_rows(table) for table in TABLES):
            found.append("The trace is empty: no table has a row.")
        return found

    def chunks(self, name: str, columns: Collection[str]) -> Iterator[Any]:
        """Yield the rows of a table as `pa.Table`s of some 65,000, with `columns` and `rank`: for tables beyond memory.

        Raises:
            TraceError: a file is damaged.
        """
        return (apart(piece, self._conflicts) for piece in chunks(self.directory, name, columns))

    @cached_property
    def _conflicts(self) -> frozenset[str]:
        """Module names that ranks give to different modules."""
        try:
            seen = [piece.to_pandas() for piece in chunks(self.directory, "modules", ("module", "class_name", "shape"))]
        except TraceError:
            return frozenset()  # whoever reads that table will be told
        return conflicting(pd.concat(seen, ignore_index=True)) if seen else frozenset()

    def sums(self, aggregation: Aggregation) -> pd.DataFrame:
        """Sum over a table by keys; rows are in the order of the keys, with `n_rows`, names as categories.

        Raises:
            TraceError: a file is damaged.
            UsageError: `engine` is unknown or not installed.
        """
        return aggregate(self.directory, aggregation, self.engine)

    def _n_rows(self, name: str) -> int:
        return sum(source.n_rows() for source in sources(self.directory, name))

    def _last_row(self) -> str:
        pieces = (piece for table in TABLES for piece in self.chunks(table, ("time_ns",)))
        times = [time for piece in pieces if pd.notna(time := piece.column("time_ns").to_pandas().max())]
        if not times:
            return "no row was written"
        last = datetime.fromtimestamp(max(times) / 1e9, tz=UTC)
        return f"the last row is of {last:%Y-%m-%d %H:%M:%S} UTC"

    def arrow(self, name: str, columns: Collection[str] | None = None) -> Any:
        """Read a table as a `pa.Table`, for those who need whole columns and no frame."""
        tables: list[Any] = []
        for source in sources(self.directory, name):
            tables += [with_rank(piece, source.rank) for piece in source.pieces(name, columns)]
            if source.cut_after is not None and not self.is_live:
                self._cuts[source.path.name + str(source.rank)] = (
                    f"The live file of {name}, rank {source.rank}, is cut after {source.cut_after} batches; the rest "
                    "of it cannot be read."
                )
        tables = tables or [with_rank(select(table_schema(name), columns).empty_table(), 0)]
        return apart(pa.concat_tables(tables).unify_dictionaries(), self._conflicts)

    def __repr__(self) -> str:
        state = "being written" if self.is_live else "complete" if self.is_complete else "not closed"
        return f"Trace({str(self.directory)!r}, {state})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td style='text-align:right'>{self._n_rows(name):,}</td></tr>" for name in TABLES
        )
        problems = "".join(f"<li>{html.escape(problem)}</li>" for problem in self.problems)
        return (
            f"<p><b>mxprobe trace</b> {html.escape(str(self.directory))}</p>"
            f"<table><tr><th>table</th><th>rows</th></tr>{rows}</table>" + (f"<ul>{problems}</ul>" if problems else "")
        )
