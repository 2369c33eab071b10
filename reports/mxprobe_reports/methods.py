"""How every number on the page is defined, with the raw ratios for comparison with the paper."""

import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import Thresholds, ratios
from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.numbers import number
from mxprobe.schema import Rule

from .operands import Operands
from .rendering import render

_OVERSHOOTING = {rule.value for rule in Rule if not rule.covers_amax}
"""Scale rules under which the deadzone is not orthogonal to the rest."""
_RAW = ("raw_scale", "raw_deadzone", "raw_grid", "raw_cross", "cos_scale_grid", "gain", "gain_ideal")


def section(operands: Operands, thresholds: Thresholds) -> Markup:
    """Return the card of definitions, raw ratios and thresholds."""
    values = vars(thresholds).items()
    return render(
        "methods.html",
        overshooting=sorted(set(operands.totals["rule"]) & _OVERSHOOTING),
        raw=_raw(operands) if len(operands.totals) else [],
        thresholds=[[name, v if isinstance(v, str) else number(float(v))] for name, v in values],
    )


def _raw(operands: Operands) -> list[list[str]]:
    sums = operands.totals.groupby("role")[list(ratios.ADDITIVE)].sum(min_count=1)
    frame: pd.DataFrame = ratios.tensor_ratios(sums)
    return [
        [ROLE_LABELS[operands.roles[int(role)]], *[number(float(row[key])) for key in _RAW]]
        for role, row in zip(frame.index, frame.to_dict("records"), strict=True)
    ]
