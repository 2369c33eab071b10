"""Where it hurts and where the error is: layers by operands, the worst operands, the split by operand role."""

import numpy as np
import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.schema import Component, Verdict

from . import names
from .explorer import MEASURES, default_measure, measures
from .gaussian_bands import bands
from .markup import Html, basis, card, chart, join, percent, table, tag
from .operands import Operands

N_WORST = 5
_PARTS = (("scale", "scale", "out_scale"), ("deadzone", "deadzone", "out_deadzone"), ("grid", "grid", "out_grid"))


def section(
    operands: Operands, frame: pd.DataFrame, component: Component, verdict: Verdict, *, has_b: bool = False
) -> Html:
    """Two cards side by side. `frame` is `explorer.columns(operands)`; with `has_b` another run lies over this one."""
    if frame.empty:
        why = "No operand was measured in this trace, so there is no error to show."
        return card("Where the error is", tag("p", why, class_="empty"), id="error")
    cards = (_hurts(operands, frame, verdict), _where(operands, component, has_b=has_b))
    return tag("div", *cards, class_="row two", id="error")


def _hurts(operands: Operands, frame: pd.DataFrame, verdict: Verdict) -> Html:
    text = "By output error, each operand quantized alone; loss sensitivity is not in this trace."
    kind = basis("measured", "output error")
    if verdict is Verdict.NOTHING_QUANTIZED:
        quantizers = sorted(
            {f"{f} {r}" for f, r in zip(operands.totals["format"], operands.totals["rule"], strict=True)}
        )
        text = f"Nothing is quantized here: this is what {', '.join(quantizers)} would do to these tensors."
        kind = basis("predicted", "output error")
    label = "Heatmap of GEMM output error, operands by layers"
    return card(
        "Where it hurts",
        chart("hurts", label, size="heat"),
        tag("h3", "Worst operands"),
        _worst(operands, frame),
        tag("p", text, class_="note"),
        kind=kind,
    )


def _worst(operands: Operands, frame: pd.DataFrame) -> Html:
    order = np.argsort(-np.nan_to_num(np.asarray(frame["out_error"], dtype=float), nan=-1.0))[:N_WORST]
    rows: list[list[object]] = []
    for i in order:
        m, r = int(operands.totals["module"].iloc[i]), int(operands.totals["role"].iloc[i])
        pick = tag("button", operands.modules[m], type="button", class_="pick", data_pick=f"{m},{r}")
        shares = [percent(float(frame[name].iloc[i])) for name in ("out_error", "out_zeroed", "zero_frac")]
        rows.append([pick, names.ROLE_LABELS[operands.roles[r]], *shares])
    return table(
        ["module", "operand", "output error", "on zeroed", "zeroed values"], rows, numeric=(2, 3, 4), class_="compact"
    )


def _where(operands: Operands, component: Component, *, has_b: bool) -> Html:
    chosen = default_measure(component)
    options = [
        tag("option", m["label"], value=m["key"], selected="selected" if m["key"] == chosen else None)
        for m in measures(has_b=has_b)
        if m["key"] != "out_error"
    ]
    select = tag("select", *options, id="measure", aria_label="Measure shown in the heatmap")
    text = next(m["help"] for m in MEASURES if m["key"] == chosen)
    return card(
        "Where the error is",
        chart("where", "Heatmap of the chosen measure, operands by layers", size="heat"),
        tag("p", text, id="measure-help", class_="note", aria_live="polite"),
        _split(operands),
        controls=select,
        kind=basis("measured"),
    )


def _split(operands: Operands) -> Html:
    """Remainder split of the output error, added over the modules of each role."""
    sums = operands.totals.groupby("role")[list(ratios.ADDITIVE)].sum(min_count=1)
    split = ratios.output_ratios(sums)
    legend = tag(
        "span",
        *[tag("span", tag("i", class_=color), name) for name, color, _ in _PARTS],
        class_="legend",
        style="display: inline-flex",
    )
    lines: list[Html] = []
    for role, row in zip(split.index, split.to_dict("records"), strict=True):
        shares = {name: float(row[column]) for name, _, column in _PARTS}
        lines.append(tag("span", names.ROLE_LABELS[operands.roles[int(role)]]))
        lines.append(_bar(shares))
        lines.append(tag("span", percent(float(row["out_error"])), class_="total"))
    for rule in sorted(set(operands.totals["rule"])):
        lines += _gaussian_line(rule)
    heading = tag("h3", "Split of the output error by operand ", legend, style="margin-top: 8px")
    return heading + tag("div", join(lines), class_="split")


def _gaussian_line(rule: str) -> list[Html]:
    """The same split of Gaussian data, middle of the octave: what a level is to be held against."""
    band = bands(rule)
    if not band:
        return []
    shares = {name: sum(band[name]) / 2 for name in ("scale", "deadzone", "grid")}
    low, high = (percent(value) for value in band["nmse"])
    title = f"Independent Gaussian data under {rule}: {low} to {high}, by their root mean square"
    label = tag("span", "Gaussian", title=title, class_="reference")
    return [label, _bar(shares), tag("span", percent(sum(band["nmse"]) / 2), class_="total")]


def _bar(shares: dict[str, float]) -> Html:
    words = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    if not all(np.isfinite(share) for share in shares.values()):
        return tag("span", "not measured", class_="note")
    positive = {name: max(share, 0.0) for name, share in shares.items()}
    whole = sum(positive.values()) or 1.0
    if shares["scale"] < 0:
        words += " (no scale problem: the power-of-two scales do better than amax/6)"
    parts = [
        tag("i", class_=name, style=f"width: {100 * share / whole:.2f}%")
        for name, share in positive.items()
        if share > 0
    ]
    return tag("div", *parts, class_="bar", role="img", aria_label=words, title=words)
