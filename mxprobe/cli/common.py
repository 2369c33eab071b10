"""What commands have in common: text that is safe in a terminal, tables, files they write, `--engine`."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.errors import TraceError, UsageError
from mxprobe.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from mxprobe.trace import Trace

ENGINES = ("arrow", "duckdb", "ray")
"""As in `mxprobe.trace.aggregation`, whose import takes too long for `--help`."""
MEASUREMENTS = ("tensors", "outputs", "rollouts", "sensitivity")
"""Tables of which one row at least is needed to judge a trace."""

engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="arrow",
    show_default=True,
    help="What sums large tables: this process; DuckDB on all cores; or Ray Data on a cluster that sees the trace.",
)


def escape(text: str) -> str:
    """Return the text so that it is neither markup to rich nor a command to the terminal."""
    from rich.markup import escape

    return escape(printable(text, keep="\n"))


def note(text: str) -> None:
    click.echo(f"note: {printable(text)}", err=True)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[int] = (),
    bold: Collection[int] = (),
    is_lined: bool = True,
    legend: str = "",
) -> Table:
    """Return a rich table of escaped text.

    Columns in `right` are aligned right and not wrapped, the others fold. Rows in `bold` are bold. A table with a
    `legend` below it is a wide one, drawn narrow.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD if is_lined else None, pad_edge=False)
    if legend:
        drawn.padding, drawn.caption, drawn.caption_justify = (0, 1, 0, 0), escape(legend), "left"
    for position, name in enumerate(head):
        if position in right:
            drawn.add_column(escape(name), justify="right", no_wrap=True)
        else:
            drawn.add_column(escape(name), overflow="fold")
    for position, row in enumerate(rows):
        drawn.add_row(*map(escape, row), style="bold" if position in bold else None)
    return drawn


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raise UsageError in place of an OSError: the page at `path` could not be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}",
            cause="the directory does not exist, or is not writable",
            remedy="name another file with -o",
        ) from None


def require_measurements(trace: Trace) -> None:
    """Raise TraceError if the trace holds no measurement. To be called after what there is was shown."""
    if any(len(trace.table(name, ("step",))) for name in MEASUREMENTS):
        return
    raise TraceError(
        f"nothing was measured in {trace.directory}, so there is nothing to judge",
        cause="the probe was taken off before its first probed step, or the module names given matched nothing",
        remedy="attach again for longer, or with a smaller --every; `mxprobe status` counts the probed steps",
    )
