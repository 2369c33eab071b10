"""Text and tables for the terminal, whatever names hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from mxprobe.printable import printable

if TYPE_CHECKING:
    from rich.table import Table


def escape(text: str) -> str:
    """Return the text so that it is neither markup to rich nor a command to the terminal."""
    from rich.markup import escape

    return escape(printable(text, keep="\n"))


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
