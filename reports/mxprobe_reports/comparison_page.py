"""`mxprobe compare A B -o FILE`: the comparison of two runs as a page of its own, its curves laid over each other.

The page says what the terminal says, and draws what the levels and intervals were computed from: the aligned steps of
the metrics that both runs logged, and of the errors that changed most.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe._version import __version__
from mxprobe.attribution.intervals import Gain
from mxprobe.comparison import Comparison
from mxprobe.comparison.alignment import Steps
from mxprobe.comparison.levels import ErrorChange, SignalChange, error_series, signal_series
from mxprobe.trace import Trace

from . import packing, shell, symptoms
from .markup import Html, basis, card, chart, join, number, pairs, percent, table, tag
from .names import ROLE_LABELS
from .symptoms import Signal

ERRORS_DRAWN = 12
_FROM_ZERO = ("reward_mean", "entropy", "grad_norm")
_MEASURES = {
    "nmse": "operand error",
    "output_error": "output error",
    "zero_frac": "values rounded to zero",
    "realised_error": "realised output error",
}


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
        """The curves behind a comparison of these two traces.

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
                for i, each in enumerate(_to_draw(comparison.errors))
            ),
        )

    def render(self, *, command_line: str = "") -> str:
        """The HTML document, self-contained."""
        body = join(
            [
                self._headline(),
                tag("div", *[_metric_card(each) for each in self.signals], class_="row four", id="signals"),
                self._error_curves(),
                self._tables(),
                card("Versions and command line", pairs(self._provenance(command_line)), id="versions"),
            ],
            "\n",
        )
        title = f"{self.name_b} against {self.name_a}"
        return shell.render(title, [self._steps()], body, self.page_data(), controls=Html(""))

    def page_data(self) -> dict[str, Any]:
        """What page.js reads: the curves, and that there are no operands to explore."""
        overlays = (*self.signals, *self.errors)
        return {
            "signals": symptoms.page_data([each.a for each in overlays], [each.b for each in overlays]),
            "operands": {"module": [], "role": [], "rule": [], "columns": {}},
            "modules": {"names": [], "kinds": [], "blocks": [], "slugs": []},
            "selected": {"module": -1, "role": -1},
            **{name: [] for name in ("roles", "bands", "views", "measures", "outputs", "events")},
            "against": None,
        }

    def _steps(self) -> str:
        alignment = self.comparison.alignment
        if alignment.is_aligned:
            return f"aligned by {alignment.axis}, {_span(alignment.a)}"
        return f"each over its own {alignment.unit}, A {_span(alignment.a)}, B {_span(alignment.b)}"

    def _headline(self) -> Html:
        comparison, prediction = self.comparison, self.comparison.prediction
        names = tag(
            "p",
            *(tag("b", "A "), tag("code", self.name_a), " (solid) · ", tag("b", "B "), tag("code", self.name_b)),
            " (dashed) · ",
            self._steps(),
            class_="note",
        )
        rows = [
            ["Part of the output error removed, by A's what-ifs", _gain(prediction.predicted), basis("predicted")],
            ["Part of the output error removed in B", _gain(prediction.measured), basis("measured")],
        ]
        shown = [table(["what was predicted", "share [95 %]", ""], rows, numeric=(1,))] if prediction.predicted else []
        symptom = comparison.symptom
        if symptom is not None:
            gates = [["A", number(symptom.a), number(symptom.gate_a)], ["B", number(symptom.b), number(symptom.gate_b)]]
            shown.append(table(["mismatch of rollout and training", "median", "gate"], gates, numeric=(1, 2)))
        warnings = [tag("p", text, class_="problem") for text in comparison.alignment.warnings]
        said = [tag("p", comparison.headline, class_="headline"), tag("p", prediction.text), names]
        tables = tag("div", *shown, class_="charts", style="margin-top: 8px")
        return card("B relative to A", *said, *warnings, tables, id="against", kind=basis("measured"))

    def _error_curves(self) -> Html:
        n_clear = sum(each.is_clear for each in self.comparison.errors)
        title = "Errors that changed most" if n_clear else "Errors: none changed clearly"
        if not self.errors:
            return card(title, tag("p", "No error was measured in both runs.", class_="empty"), id="error")
        figures = [
            tag(
                "figure",
                tag(
                    "figcaption",
                    tag("span", each.a.title, style="overflow-wrap: anywhere"),
                    tag("div", each.said, class_="note"),
                ),
                _chart(each),
            )
            for each in self.errors
        ]
        counted = f"{n_clear} of {len(self.comparison.errors)} changed clearly"
        note = f"Relative and squared. {counted}; the table below has all."
        body = [tag("p", note, class_="note"), tag("div", *figures, class_="charts")]
        return card(title, *body, id="error", kind=basis("measured"), class_="long")

    def _tables(self) -> Html:
        comparison = self.comparison
        config = [
            [*(tag("code", text) for text in (each.name, each.a, each.b)), each.origin] for each in comparison.config
        ]
        errors = [_error_row(each) for each in comparison.errors]
        head = ["error", "operand", "modules", "phase", "A", "B", "B / A [95 %]", "steps"]
        parts = [
            tag("h3", "What was different"),
            table(["setting", "A", "B", "from"], config)
            if config
            else tag("p", "Nothing that is known.", class_="note"),
            tag(
                "details",
                tag("summary", f"All errors measured in both runs ({len(errors)})"),
                table(head, errors, numeric=(4, 5, 6, 7)),
            ),
        ]
        return card("Settings and errors", *parts, id="settings", class_="long")

    def _provenance(self, command_line: str) -> list[tuple[object, object]]:
        entries: list[tuple[object, object]] = [
            ("A", self.comparison.a),
            ("B", self.comparison.b),
            ("page made by", f"mxprobe {__version__}"),
            ("intervals", "95 %, at the effective number of steps; they are about these two runs, not about seeds"),
        ]
        return [*entries, ("command", tag("code", command_line))] if command_line else entries


def write_comparison(a: Trace, b: Trace, comparison: Comparison, path: Path, *, command_line: str = "") -> None:
    """Write the page to `path`, whole or not at all. OSError when the place cannot be written."""
    text = ComparisonPage.of(a, b, comparison).render(command_line=command_line)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _name(directory: Path, *, with_parent: bool) -> str:
    return f"{directory.parent.name}/{directory.name}" if with_parent else directory.name


def _span(steps: Steps) -> str:
    return f"{steps.first} to {steps.last}"


def _to_draw(changes: tuple[ErrorChange, ...]) -> list[ErrorChange]:
    """The clear ones by size of the change; where there are none, what the layers realised. All have values."""
    changes = tuple(each for each in changes if math.isfinite(each.a) and math.isfinite(each.b))
    clear = sorted((each for each in changes if each.is_clear), key=lambda each: -abs(math.log(each.ratio)))
    realised = [each for each in changes if each.measure == "realised_error"]
    return (clear or realised or list(changes))[:ERRORS_DRAWN]


def _metric(position: int, change: SignalChange, a: pd.Series, b: pd.Series) -> Overlay:
    title = change.metric.replace("_", " ")
    said = f"B − A {_interval(change.change.difference, change.change.low, change.change.high)}"
    said += f"; A {change.trend_a}, B {change.trend_b}"
    curve_a, curve_b = (_curve(f"m{position}", title, each, from_zero=change.metric in _FROM_ZERO) for each in (a, b))
    return Overlay(curve_a, curve_b, said, change.change.is_clear)


def _error(position: int, change: ErrorChange, a: pd.Series, b: pd.Series) -> Overlay:
    place = f"{change.kind} {ROLE_LABELS.get(change.role, change.role)}".rstrip()
    title = f"{_MEASURES[change.measure]}, {place}, {change.phase}"
    said = f"B / A {_interval(change.ratio, change.ratio_low, change.ratio_high)}"
    curve_a, curve_b = (_curve(f"e{position}", title, each, from_zero=True, is_share=True) for each in (a, b))
    return Overlay(curve_a, curve_b, said, change.is_clear)


def _curve(id: str, title: str, by_step: pd.Series, *, from_zero: bool, is_share: bool = False) -> Signal:
    """A series by step, as at most 2,000 points: means of neighbouring steps beyond that."""
    steps, values = by_step.index.to_numpy(dtype=np.int64), by_step.to_numpy(dtype=float)
    bins = packing.bin_of(len(steps), min(len(steps), packing.MAX_POINTS))
    if len(steps) > packing.MAX_POINTS:
        first = np.flatnonzero(np.diff(bins, prepend=-1))
        values = _means(values, first)
        steps = steps[first]
    return Signal(id, title, "", steps, values, from_zero, "", is_share)


def _means(values: npt.NDArray[np.float64], first: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    return np.add.reduceat(values, first) / np.diff(np.append(first, len(values)))


def _metric_card(each: Overlay) -> Html:
    moved = f"{number(each.a.recent)} → {number(each.b.recent)}"
    header = tag("header", tag("h2", each.a.title), basis("measured"))
    value = tag("p", moved, tag("small", "lately, A → B"), class_="value")
    said = tag("p", tag("b", each.said) if each.is_clear else each.said, class_="note")
    return tag("section", header, value, _chart(each), said, class_="card signal")


def _chart(each: Overlay) -> Html:
    show = percent if each.a.is_share else number
    label = f"{each.a.title} over steps; lately {show(each.a.recent)} in A and {show(each.b.recent)} in B; {each.said}"
    return chart(f"signal-{each.a.id}", label, size="short")


def _error_row(each: ErrorChange) -> list[object]:
    interval = _interval(each.ratio, each.ratio_low, each.ratio_high)
    text = tag("b", interval) if each.is_clear else interval
    operand = ROLE_LABELS.get(each.role, each.role or "–")
    cells = [_MEASURES[each.measure], operand, tag("code", each.kind), each.phase, number(each.a), number(each.b)]
    return [*cells, text, each.n_steps]


def _interval(value: float, low: float, high: float) -> str:
    return f"{number(value)} [{number(low)}, {number(high)}]"


def _gain(gain: Gain | None) -> str:
    return "–" if gain is None else _interval(gain.value, gain.low, gain.high)
