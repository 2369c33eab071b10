"""Error of the weight gradients by depth: what rounding G and X along tokens puts into each dW."""

import numpy as np
import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import ratios
from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.numbers import percent
from mxprobe.schema import Role

from . import gradient_errors, names
from .operands import Operands
from .rendering import render

ROLES = (Role.G_WGRAD.value, Role.X_WGRAD.value)
MAX_ROWS = 12


def section(operands: Operands, measured: pd.DataFrame) -> Markup:
    """Return chart and table by layer; the backward may not be quantized, so these are predictions.

    `measured` is `gradient_errors.collect`: the error with both operands rounded, and the gradient's sampling noise.
    """
    shown = by_depth(operands)
    if len(shown) > MAX_ROWS:
        shown = shown.iloc[np.linspace(0, len(shown) - 1, MAX_ROWS).round().astype(int)]
    return render(
        "depth.html",
        blocks=[str(block) for block in shown.index],
        roles=[[ROLE_LABELS[str(role)], *map(percent, shown[role])] for role in shown.columns if len(shown)],
        has_gradients=not measured.empty,
        sentence=gradient_errors.sentence(measured),
    )


def by_depth(operands: Operands) -> pd.DataFrame:
    """Return the median `out_error` of each wgrad operand over the modules of a block; index block, columns roles."""
    present = [(operands.roles.index(role), role) for role in ROLES if role in operands.roles]
    error = ratios.output_ratios(operands.totals)["out_error"].to_numpy(dtype=float)
    blocks = [names.block_of(operands.modules[int(m)]) for m in operands.totals["module"]]
    frame = pd.DataFrame({"block": blocks, "role": operands.totals["role"].to_numpy(), "error": error})
    columns = {
        role: frame[(frame["role"] == position).to_numpy()].groupby("block", sort=False)["error"].median()
        for position, role in present
    }
    return pd.DataFrame(columns).dropna(how="all")
