"""Error of the weight gradients by depth: what rounding G and X along tokens puts into each dW."""

import numpy as np
import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.schema import Role

from . import gradients, names
from .markup import Html, basis, card, chart, percent, scope, table, tag
from .operands import Operands

ROLES = (Role.G_WGRAD.value, Role.X_WGRAD.value)
MAX_ROWS = 12


def section(operands: Operands, measured: pd.DataFrame) -> Html:
    """Chart and table by layer; the backward may not be quantized, so these are predictions.

    `measured` is `gradients.collect`: the error with both operands rounded, and the sampling noise of the gradient.
    """
    title, kind = "Gradient error by depth", basis("predicted", "what-if on the backward")
    by_layer = by_depth(operands)
    if by_layer.empty:
        why = "No operand of a weight-gradient GEMM was measured in this trace."
        return card(title, tag("p", why, class_="empty"), id="depth", kind=kind)
    note = tag(
        "p",
        "‖error of dW‖² / ‖dW‖² with G, or X, rounded along tokens and the other left alone: exact and local to the "
        "layer. Errors that travel down through dgrad are not in it, and whether the run quantizes its backward is not "
        f"recorded. {gradients.sentence(measured)}",
        class_="note",
    )
    label = "Output error of the weight-gradient GEMM of every layer, by operand"
    figure = chart("depth", label, size="wide", picks="Left and right arrow keys select a layer")
    kind = tag("span", *([] if measured.empty else [scope("steps", "rank")]), kind)
    return card(title, figure, _table(by_layer), note, id="depth", kind=kind)


def by_depth(operands: Operands) -> pd.DataFrame:
    """Median `out_error` of each wgrad operand over the modules of a block; index block, columns roles."""
    present = [(operands.roles.index(role), role) for role in ROLES if role in operands.roles]
    error = ratios.output_ratios(operands.totals)["out_error"].to_numpy(dtype=float)
    blocks = [names.block_of(operands.modules[int(m)]) for m in operands.totals["module"]]
    frame = pd.DataFrame({"block": blocks, "role": operands.totals["role"].to_numpy(), "error": error})
    columns = {
        role: frame[(frame["role"] == position).to_numpy()].groupby("block", sort=False)["error"].median()
        for position, role in present
    }
    return pd.DataFrame(columns).dropna(how="all")


def _table(by_layer: pd.DataFrame) -> Html:
    if len(by_layer) < 2:
        return Html("")
    chosen = np.unique(np.linspace(0, len(by_layer) - 1, MAX_ROWS).round().astype(int))
    shown = by_layer.iloc[chosen]
    head = ["median over the layer's modules", *map(str, shown.index)]
    rows: list[list[object]] = [
        [names.ROLE_LABELS[str(role)], *[percent(float(v)) for v in shown[role]]] for role in shown.columns
    ]
    title = tag("p", "By layer ", scope("steps", "rank", "operands"), class_="note")
    return title + table(head, rows, numeric=range(1, len(head)), class_="compact")
