"""B relative to A: the comparison of two runs in words and tables, and B's curves to lay over A's."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mxprobe.comparison import Comparison
from mxprobe.comparison.levels import ErrorChange, SignalChange

from . import explorer, names, operands, outputs, packing, symptoms
from .inputs import Inputs
from .markup import Html, basis, card, number, scope, table, tag
from .operands import Binned, Operands

ERRORS_SHOWN = 12


@dataclass(frozen=True)
class Against:
    """Run B. `binned` has B's sums under A's operands, `error` (A's operands,) B's output error, NaN where not in B."""

    name: str
    comparison: Comparison
    signals: list[symptoms.Signal]
    binned: Binned
    error: npt.NDArray[np.float64]

    @classmethod
    def of(cls, inputs: Inputs, comparison: Comparison, a: Operands) -> "Against":
        """Read B and put its operands in the order of A's."""
        seen = operands.scan(inputs.tensors)
        modules = list(dict.fromkeys([*seen.modules, *outputs.modules_of(inputs.outputs)]))
        b = operands.collect(inputs.tensors, seen, modules, n_pages=2)
        place = a.index()
        row = np.array([place.get(key, -1) for key in b.index()], dtype=np.int64)
        sums = b.binned.sums.reset_index()
        sums["operand"] = row[sums["operand"].to_numpy()] if len(sums) else sums["operand"]
        sums = sums[sums["operand"] >= 0].set_index(["operand", "bin"])
        error = np.full(len(a.totals), np.nan)
        error[row[row >= 0]] = explorer.columns(b)["out_error"].to_numpy(dtype=float)[row >= 0]
        mismatch = outputs.collect(inputs.outputs, modules).mismatch
        return cls(
            name=inputs.name,
            comparison=comparison,
            signals=symptoms.headline_signals(inputs, mismatch),
            binned=Binned("B", b.binned.steps, sums),
            error=error,
        )

    def page_data(self, a: Operands) -> dict[str, Any]:
        """For page.js: B's lines in A's order, and its output error."""
        return {
            "name": self.name,
            "view": explorer.view(len(a.totals), self.binned),
            "error": packing.pack(self.error),
        }


def section(against: Against, name: str) -> Html:
    """What changed from A, called `name`, to B."""
    comparison = against.comparison
    steps = comparison.alignment.a
    aligned = "each over its own steps"
    if comparison.alignment.is_aligned:
        aligned = f"aligned by step, {steps.first} to {steps.last}"
    names_line = tag(
        "p",
        *(tag("b", "A "), tag("code", name), " · ", tag("b", "B ")),
        *(tag("code", against.name), f" · {aligned}; B is dashed in the signals and in the selected layer"),
        class_="note",
    )
    warnings = [tag("p", text, class_="problem") for text in comparison.alignment.warnings]
    parts = [
        tag("p", comparison.headline, class_="headline"),
        tag("p", comparison.prediction.text),
        names_line,
        *warnings,
    ]
    drawers = [
        tag("details", tag("summary", f"{title} ({len(rows)})"), table(head, rows, numeric=numeric))
        for title, head, rows, numeric in (_config(comparison), _signals(comparison), _errors(comparison))
        if rows
    ]
    kind = tag("span", scope("steps", "rank", "operands"), basis("measured"))
    return card("B relative to A", *parts, tag("div", *drawers, class_="drawers"), id="against", kind=kind)


_Table = tuple[str, list[str], list[list[object]], tuple[int, ...]]


def _config(comparison: Comparison) -> _Table:
    rows: list[list[object]] = [[tag("code", c.name), c.a, c.b, c.origin] for c in comparison.config]
    return "What was different", ["setting", "A", "B", "from"], rows, ()


def _signals(comparison: Comparison) -> _Table:
    head = ["metric", "A", "B", "B − A [95 %]", "trend A", "trend B"]
    return "Metrics, last quarter", head, [_signal(each) for each in comparison.signals], (1, 2, 3)


def _signal(each: SignalChange) -> list[object]:
    interval = f"{number(each.change.difference)} [{number(each.change.low)}, {number(each.change.high)}]"
    text = tag("b", interval) if each.change.is_clear else interval
    return [each.metric, number(each.a.mean), number(each.b.mean), text, each.trend_a, each.trend_b]


def _errors(comparison: Comparison) -> _Table:
    clear = sorted((c for c in comparison.errors if c.is_clear), key=lambda each: -abs(math.log(each.ratio)))
    head = ["error", "operand", "modules", "phase", "A", "B", "B / A [95 %]"]
    title = f"Errors that changed clearly, of {len(comparison.errors)}"
    return title, head, [_error(each) for each in clear[:ERRORS_SHOWN]], (4, 5, 6)


def _error(each: ErrorChange) -> list[object]:
    interval = f"{number(each.ratio)} [{number(each.ratio_low)}, {number(each.ratio_high)}]"
    operand = names.ROLE_LABELS.get(each.role, each.role or "–")
    return [each.measure.replace("_", " "), operand, each.kind, each.phase, number(each.a), number(each.b), interval]
