"""B laid over A in a report: what changed in words and tables, and B's curves."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from mxprobe.comparison import Comparison, tables

from . import explorer, operands, outputs, symptoms
from .inputs import Inputs
from .operands import Binned, Operands
from .rendering import render

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
        """Return B's lines in A's order, for page.js."""
        return {"view": explorer.view(len(a.totals), self.binned)}


def section(against: Against, name: str) -> Markup:
    """Return the card of what changed from A, called `name`, to B."""
    comparison = against.comparison
    clear = tables.clear_errors(comparison)
    drawers = [
        ("What was different", tables.settings(comparison)),
        ("Metrics, last quarter", tables.metrics(comparison)),
        (f"Errors that changed clearly, of {len(comparison.errors)}", tables.errors(clear[:ERRORS_SHOWN])),
    ]
    return render("against.html", comparison=comparison, name_a=name, name_b=against.name, drawers=drawers)
