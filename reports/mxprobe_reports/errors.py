"""Where it hurts and where the error is: layers by operands, the worst operands, the split by operand role."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.schema import Component, Verdict

from . import names
from .explorer import default_measure, hurts, measures
from .gaussian_bands import bands
from .markup import Html, basis, card, chart, join, number, percent, scope, tag
from .operands import Operands
from .sensitivities import Sensitivities

N_WORST = 5
_PARTS = (("scale", "scale", "out_scale"), ("deadzone", "deadzone", "out_deadzone"), ("grid", "grid", "out_grid"))


def section(
    operands: Operands,
    frame: pd.DataFrame,
    component: Component,
    verdict: Verdict,
    *,
    sensitivities: Sensitivities | None = None,
    has_b: bool = False,
) -> Html:
    """Two cards side by side. `frame` is `explorer.columns(operands, sensitivities)`; `has_b`: a run lies over this."""
    if frame.empty:
        why = "No operand was measured in this trace, so there is no error to show."
        return card("Where the error is", tag("p", why, class_="empty"), id="error")
    cards = (
        _hurts(operands, frame, verdict, sensitivities),
        _where(operands, component, sensitivities, has_b=has_b),
    )
    return tag("div", *cards, class_="row two", id="error")


_KEYS = "Arrow keys move the selection, Enter goes to the selected layer"


def _hurts(operands: Operands, frame: pd.DataFrame, verdict: Verdict, sensitivities: Sensitivities | None) -> Html:
    key = hurts(sensitivities)
    follows = scope("steps", "rank") if key == "predicted_kl" else ""
    if key == "predicted_kl":
        kind = basis("predicted", "KL of each operand alone")
        text = "" if sensitivities is None else sensitivities.sentence()
    elif verdict is Verdict.NOTHING_QUANTIZED:
        quantizers = sorted(
            {f"{f} {r}" for f, r in zip(operands.totals["format"], operands.totals["rule"], strict=True)}
        )
        text = f"Nothing is quantized here: this is what {', '.join(quantizers)} would do to these tensors."
        kind = basis("predicted", "output error")
    else:
        kind = basis("measured", "output error")
        text = "By output error, each operand quantized alone. " + (
            "How much the policy feels each was not measured (attach with --sensitivity-every)."
            if sensitivities is None
            else sensitivities.sentence()
        )
    measure = next(m for m in measures(sensitivities, has_b=False) if m["key"] == key)
    return card(
        "Where it hurts",
        chart("hurts", f"Heatmap of {measure['label']}, operands by layers", size="heat", picks=_KEYS),
        tag("h3", "Worst operands", id="worst-title"),
        _worst(operands, frame, key),
        tag("p", text, class_="note"),
        kind=follows + kind if follows else kind,
    )


def _worst(operands: Operands, frame: pd.DataFrame, key: str) -> Html:
    """As page.js fills it again for the steps, rank and operands chosen."""
    order = np.argsort(-np.nan_to_num(np.asarray(frame[key], dtype=float), nan=-1.0))[:N_WORST]
    shown = (
        ("predicted_kl", "out_error", "out_zeroed")
        if key == "predicted_kl"
        else ("out_error", "out_zeroed", "zero_frac")
    )
    rows: list[Html] = []
    for i in order:
        m, r = int(operands.totals["module"].iloc[i]), int(operands.totals["role"].iloc[i])
        pick = tag("button", operands.modules[m], type="button", class_="pick", data_pick=f"{m},{r}")
        values = [_WORST[name][1](float(frame[name].iloc[i])) for name in shown]
        cells = [tag("td", pick), tag("td", names.ROLE_LABELS[operands.roles[r]])]
        rows.append(tag("tr", *cells, *[tag("td", value, class_="num") for value in values]))
    head = [tag("th", text, scope="col") for text in ("module", "operand")]
    head += [tag("th", _WORST[name][0], scope="col", class_="num") for name in shown]
    body = tag("tbody", *rows, id="worst", data_columns=" ".join(shown))
    return tag("div", tag("table", tag("thead", tag("tr", *head)), body, class_="compact"), class_="scroll")


_WORST: dict[str, tuple[str, Callable[[float], str]]] = {
    "predicted_kl": ("predicted KL", number),
    "out_error": ("output error", percent),
    "out_zeroed": ("on zeroed", percent),
    "zero_frac": ("zeroed values", percent),
}


def _where(operands: Operands, component: Component, sensitivities: Sensitivities | None, *, has_b: bool) -> Html:
    chosen = default_measure(component)
    offered = [m for m in measures(sensitivities, has_b=has_b) if m["key"] != hurts(sensitivities)]
    options = [
        tag("option", m["label"], value=m["key"], selected="selected" if m["key"] == chosen else None) for m in offered
    ]
    select = tag("select", *options, id="measure", aria_label="Measure shown in the heatmap")
    text = next(m["help"] for m in offered if m["key"] == chosen)
    return card(
        "Where the error is",
        chart("where", "Heatmap of the chosen measure, operands by layers", size="heat", picks=_KEYS),
        tag("p", text, id="measure-help", class_="note", aria_live="polite"),
        _split(operands),
        controls=select,
        kind=tag("span", basis("measured"), id="measure-basis"),
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
    gaussian = [part for rule in sorted(set(operands.totals["rule"])) for part in _gaussian_line(rule)]
    heading = tag("h3", "Split of the output error by operand, all layers ", legend, style="margin-top: 8px")
    return heading + tag(
        "div", tag("div", join(lines), id="split", class_="parts"), tag("div", join(gaussian), class_="parts"),
        class_="split",
    )  # fmt: skip


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
