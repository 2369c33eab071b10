"""Figures for a notebook: a trace's signals, its output errors by layer and operand, and its mismatch, in plotly."""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import escape

from mxprobe.attribution.rank_copies import PLACED
from mxprobe.attribution.ratios import ADDITIVE, mismatch_by_step, output_ratios, totals
from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.schema import Role
from mxprobe.trace import Trace

CONFIG: dict[str, Any] = {"showSendToCloud": False, "displaylogo": False}
"""For `figure.show(config=CONFIG)`: plotly's own default offers to upload the figure."""

_METRICS = ("reward_mean", "entropy", "grad_norm", "mismatch_logp_abs_mean", "kl_ref", "length_mean")


def figures(trace: Trace) -> dict[str, Any]:
    """Return `plotly.graph_objects.Figure`s by name; what the trace has no rows for is left out.

    signals       each canonical metric that was logged, over steps
    output_error  ||GEMM output error||^2 / ||output||^2 with one operand quantized, modules x operands, all steps added
    mismatch      median over modules of |realised error in rollout - in training|, over steps

    Raises:
        TraceError: a table cannot be read.
    """
    made = {"signals": _signals(trace), "output_error": _output_error(trace), "mismatch": _mismatch(trace)}
    return {name: figure for name, figure in made.items() if figure is not None}


def _signals(trace: Trace) -> Any:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    rows = trace.table("signals", ("step", "metric", "value"))
    rows = rows[rows["metric"].isin(list(_METRICS)) & (rows["step"] >= 0)]
    series = rows.assign(metric=rows["metric"].astype(str)).groupby(["metric", "step"])["value"].mean()
    names = [name for name in _METRICS if name in series.index.get_level_values("metric")]
    if not names:
        return None
    figure = make_subplots(rows=len(names), shared_xaxes=True, vertical_spacing=0.03)
    for row, name in enumerate(names, start=1):
        by_step: pd.Series = series.loc[name]
        x, y = by_step.index.to_numpy(), by_step.to_numpy(dtype=np.float32)
        figure.add_trace(Scatter(x=x, y=y, mode="lines", name=name), row=row, col=1)
        figure.update_yaxes(title_text=name.replace("_", " "), row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(names), col=1)
    return figure.update_layout(height=160 * len(names) + 60, showlegend=False)


def _output_error(trace: Trace) -> Any:
    from plotly.graph_objects import Figure, Heatmap

    rows = trace.table("tensors", (*PLACED, *ADDITIVE))
    if rows.empty:
        return None
    # In the order of the model, not of the alphabet.
    modules = list(dict.fromkeys(rows["module"].astype(str)))
    sums = totals(rows, ["module", "role"])
    error = output_ratios(sums)["out_error"].to_numpy(dtype=float)
    place = {name: i for i, name in enumerate(modules)}
    roles = [role.value for role in Role if (sums["role"] == role.value).any()]
    z = np.full((len(roles), len(modules)), np.nan, dtype=np.float32)
    for module, role, value in zip(sums["module"].astype(str), sums["role"].astype(str), error, strict=True):
        z[roles.index(role), place[module]] = np.log10(value) if value > 0 else np.nan
    # Plotly reads a subset of HTML, and TeX between dollar signs, in every label.
    labels = [str(escape(name)).replace("$", "&#36;") for name in modules]
    text = "%{customdata}, %{y}<br>output error 10^%{z:.2f}<extra></extra>"
    # By position: of two modules whose labels are cut alike, each keeps its own column.
    heatmap = Heatmap(
        z=z,
        x=np.arange(len(modules)),
        y=[ROLE_LABELS[role] for role in roles],
        customdata=[labels] * len(roles),
        hovertemplate=text,
        colorscale="Cividis",
        colorbar={"title": {"text": "log₁₀"}},
    )
    figure = Figure(heatmap).update_yaxes(autorange="reversed")
    return figure.update_layout(title="Output error with one operand quantized", xaxis_title="module, in model order")


def _mismatch(trace: Trace) -> Any:
    from plotly.graph_objects import Figure, Scatter

    rows = trace.outputs()
    by_step = mismatch_by_step(rows) if len(rows) else pd.Series(dtype=float)
    if by_step.empty:
        return None
    line = Scatter(x=by_step.index.to_numpy(), y=by_step.to_numpy(dtype=np.float32), mode="lines+markers")
    figure = Figure(line).update_yaxes(rangemode="tozero", title_text="squared, relative")
    return figure.update_layout(title="Median |realised error in rollout − in training|", xaxis_title="step")
