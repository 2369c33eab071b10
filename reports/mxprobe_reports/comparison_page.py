"""`mxprobe compare A B -o FILE`: the comparison of two runs as a page of its own, its curves laid over each other.

The page says what the terminal says, and draws what the levels and intervals were computed from: the aligned steps of
the metrics that both runs logged, and of the errors that changed most.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mxprobe._version import __version__
from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.comparison import Comparison, tables
from mxprobe.comparison.levels import ErrorChange, SignalChange, error_series, signal_series
from mxprobe.numbers import interval, signed
from mxprobe.trace import Trace

from . import shell, symptoms
from .rendering import code, render
from .symptoms import Signal
from .versions_card import versions

ERRORS_DRAWN = 12
_FROM_ZERO = ("reward_mean", "entropy", "grad_norm")


@dataclass(frozen=True)
class Overlay:
    """One curve of both runs, and what the comparison says of it."""

    a: Signal
    b: Signal
    said: str
    is_clear: bool


@dataclass(frozen=True)
class ComparisonPage:
    """All that the page shows, computed; `render` writes it down."""

    name_a: str
    name_b: str
    comparison: Comparison
    signals: tuple[Overlay, ...]
    errors: tuple[Overlay, ...]

    @classmethod
    def of(cls, a: Trace, b: Trace, comparison: Comparison) -> "ComparisonPage":
        """Read the curves behind a comparison of these two traces.

        Raises:
            TraceError: a table cannot be read.
        """
        directories = a.directory.resolve(), b.directory.resolve()
        with_parent = directories[0].name == directories[1].name
        steps = comparison.alignment
        metrics = signal_series(a, steps.a), signal_series(b, steps.b)
        errors = dict(error_series(a, steps.a, steps)), dict(error_series(b, steps.b, steps))
        return cls(
            name_a=_name(directories[0], with_parent=with_parent),
            name_b=_name(directories[1], with_parent=with_parent),
            comparison=comparison,
            signals=tuple(
                _metric(i, each, metrics[0][each.metric], metrics[1][each.metric])
                for i, each in enumerate(comparison.signals)
            ),
            errors=tuple(
                _error(i, each, *(found[each.measure, each.kind, each.role, each.phase] for found in errors))
                for i, each in enumerate(_to_draw(comparison))
            ),
        )

    def render(self, *, command_line: str = "") -> str:
        """Return the HTML document, self-contained."""
        names = {"name_a": self.name_a, "name_b": self.name_b}
        entries: list[tuple[str, object]] = [
            ("A", self.comparison.a),
            ("B", self.comparison.b),
            ("page made by", f"mxprobe {__version__}"),
            ("intervals", "95 %, at the effective number of steps; they are about these two runs, not about seeds"),
        ]
        body = render(
            "comparison.html",
            headline=render("against.html", comparison=self.comparison, **names, drawers=[]),
            signals=self.signals,
            errors=self.errors,
            n_clear=sum(each.is_clear for each in self.comparison.errors),
            settings=tables.settings(self.comparison),
            all_errors=tables.errors(self.comparison.errors),
            versions=versions([*entries, ("command", code(command_line))] if command_line else entries),
        )
        title = f"{self.name_b} against {self.name_a}"
        return shell.page(title, [self.comparison.alignment.words], [body], self.page_data())

    def page_data(self) -> dict[str, Any]:
        """Return what page.js reads: the curves, and that there are no operands to explore."""
        overlays = (*self.signals, *self.errors)
        return {
            "signals": symptoms.page_data([each.a for each in overlays], [each.b for each in overlays]),
            "operands": {"module": [], "role": [], "rule": [], "columns": {}},
            "modules": {"names": [], "kinds": [], "blocks": [], "slugs": []},
            "selected": {"module": -1, "role": -1},
            **{name: [] for name in ("roles", "bands", "views", "measures", "outputs", "events")},
            "against": None,
        }


def write_comparison(a: Trace, b: Trace, comparison: Comparison, path: Path, *, command_line: str = "") -> None:
    """Write the page to `path`, whole or not at all. OSError when the place cannot be written."""
    shell.write(path, ComparisonPage.of(a, b, comparison).render(command_line=command_line))


def _name(directory: Path, *, with_parent: bool) -> str:
    return f"{directory.parent.name}/{directory.name}" if with_parent else directory.name


def _to_draw(comparison: Comparison) -> list[ErrorChange]:
    """Return the clear ones by size of the change; where there are none, what the layers realised. All have values."""
    changes = [each for each in comparison.errors if math.isfinite(each.a) and math.isfinite(each.b)]
    clear = [each for each in tables.clear_errors(comparison) if each in changes]
    return (clear or [each for each in changes if each.measure == "realised_error"] or changes)[:ERRORS_DRAWN]


def _metric(position: int, change: SignalChange, a: pd.Series, b: pd.Series) -> Overlay:
    title, moved = change.metric.replace("_", " "), change.change
    said = f"B − A {interval(moved.difference, moved.low, moved.high, signed)}; A {change.trend_a}, B {change.trend_b}"
    of_a, of_b = (_curve(f"m{position}", title, each, from_zero=change.metric in _FROM_ZERO) for each in (a, b))
    return Overlay(of_a, of_b, said, moved.is_clear)


def _error(position: int, change: ErrorChange, a: pd.Series, b: pd.Series) -> Overlay:
    place = f"{change.kind} {ROLE_LABELS.get(change.role, change.role)}".rstrip()
    title = f"{tables.MEASURES[change.measure]}, {place}, {change.phase}"
    said = f"B / A {interval(change.ratio, change.ratio_low, change.ratio_high)}"
    of_a, of_b = (_curve(f"e{position}", title, each, from_zero=True, is_share=True) for each in (a, b))
    return Overlay(of_a, of_b, said, change.is_clear)


def _curve(id: str, title: str, by_step: pd.Series, *, from_zero: bool, is_share: bool = False) -> Signal:
    return Signal(id, title, "", *symptoms.resampled(by_step), from_zero, "", is_share)
