"""What commands have in common: text that is safe in a terminal, tables, files they write, `--engine`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxprobe.errors import TraceError, UsageError
from mxprobe.printable import printable

if TYPE_CHECKING:
    from rich.table import Column, Table

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


def escape(text: str, *, keep: str = "") -> str:
    """Return the text so that it is neither markup to rich nor commands to the terminal; see `printable`."""
    from rich.markup import escape

    return escape(printable(text, keep=keep))


def note(text: str) -> None:
    click.echo(f"note: {printable(text)}", err=True)


def table(*columns: Column | str, **style: Any) -> Table:
    """Return an empty table with a line below its heading."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    look: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, **style}
    return Table(*columns, **look)


def right(name: str) -> Column:
    """Return a column of numbers, which must not be cut off."""
    from rich.table import Column

    return Column(name, justify="right", no_wrap=True)


def folded(name: str) -> Column:
    from rich.table import Column

    return Column(name, overflow="fold")


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
