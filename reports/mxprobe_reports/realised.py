"""Does each layer do what its inputs and weights say it should, in training and in generation?"""

import math
import statistics
from typing import Any

import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import Thresholds
from mxprobe.numbers import percent
from mxprobe.plain_data import plain_data

from . import packing
from .outputs import LABELS, Outputs
from .rendering import render


def page_data(outputs: Outputs) -> list[dict[str, Any]]:
    """Return per phase, in model order: module positions, realised and predicted relative errors, the last recipes."""
    return [
        {
            "phase": each.phase,
            "label": LABELS[each.phase],
            "module": [int(i) for i in each.module],
            "realised": plain_data(each.realised.tolist()),
            "predicted": plain_data(each.predicted.tolist()),
            "recipe_x": each.recipe_x,
            "recipe_w": each.recipe_w,
            "exact": each.exact,
            "steps": packing.pack(each.steps),
            "binned": packing.pack(each.binned),
        }
        for each in outputs.phases
    ]


def section(data: list[dict[str, Any]], thresholds: Thresholds) -> Markup:
    """Return the card; `data` is `page_data`."""
    return render("realised.html", sentences=[_sentence(phase, thresholds) for phase in data])


def _sentence(phase: dict[str, Any], thresholds: Thresholds) -> str:
    n, label = len(phase["module"]), phase["label"]
    realised = [v for v in phase["realised"] if v is not None]
    if not realised:
        return f"In {label}, no realised error is finite."
    pairs = list(zip(phase["realised"], phase["predicted"], strict=True))
    quantized = [(r, p) for r, p in pairs if r is not None and r > thresholds.quantized_error]
    if not quantized:
        most = percent(max(realised))
        return f"In {label}, all {n} modules are in high precision; the largest realised error is {most}."
    far = sum(not p or abs(math.log2(r / p)) > thresholds.far_log2 for r, p in quantized)
    recipes = pd.Series([f"X {x}, W {w}" for x, w in zip(phase["recipe_x"], phase["recipe_w"], strict=True)])
    common = recipes.value_counts()
    return (
        f"In {label}, {len(quantized)} of {n} modules are quantized, median realised error "
        f"{percent(statistics.median(realised))}; {far} have another size than predicted; the recipe reproduces "
        f"{sum(phase['exact'])} of {n} exactly. Most common recipe: {common.index[0]} ({common.iloc[0]} of {n})."
    )
