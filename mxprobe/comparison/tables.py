"""The tables of a comparison, for the terminal and for pages: settings, metrics, errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.numbers import NOTHING, interval, number, signed

from .comparison import Comparison
from .levels import ErrorChange

MEASURES = {
    "nmse": "operand error",
    "output_error": "output error",
    "zero_frac": "values rounded to zero",
    "realised_error": "realised output error",
}


@dataclass(frozen=True)
class Table:
    """Text, row by row.

    `numeric` are columns to align right, `names` columns of names, `bold` the rows that changed clearly.
    """

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    bold: frozenset[int] = frozenset()


def settings(comparison: Comparison) -> Table:
    """Return what was different about the runs themselves."""
    rows = [(each.name, each.a, each.b, each.origin) for each in comparison.config]
    return Table(("setting", "A", "B", "from"), rows, names=(0, 1, 2))


def metrics(comparison: Comparison) -> Table:
    """Return means of the last quarter, and the trends over all steps."""
    rows = [
        (
            each.metric,
            number(each.a.mean),
            number(each.b.mean),
            interval(each.change.difference, each.change.low, each.change.high, signed),
            each.trend_a,
            each.trend_b,
        )
        for each in comparison.signals
    ]
    bold = frozenset(i for i, each in enumerate(comparison.signals) if each.change.is_clear)
    return Table(("metric", "A", "B", "B − A [95 %]", "trend A", "trend B"), rows, (1, 2, 3), bold=bold)


def errors(changes: Sequence[ErrorChange]) -> Table:
    """Return geometric means over probed steps, and their ratio."""
    rows = [
        (
            MEASURES[each.measure],
            ROLE_LABELS.get(each.role, each.role or NOTHING),
            each.kind,
            each.phase,
            number(each.a),
            number(each.b),
            interval(each.ratio, each.ratio_low, each.ratio_high),
            str(each.n_steps),
        )
        for each in changes
    ]
    head = ("error", "operand", "modules", "phase", "A", "B", "B / A [95 %]", "steps")
    bold = frozenset(i for i, each in enumerate(changes) if each.is_clear)
    return Table(head, rows, (4, 5, 6, 7), names=(2,), bold=bold)


def clear_errors(comparison: Comparison) -> list[ErrorChange]:
    """Return the errors whose interval excludes no change, the largest change first."""
    return sorted((each for each in comparison.errors if each.is_clear), key=lambda each: -abs(math.log(each.ratio)))
