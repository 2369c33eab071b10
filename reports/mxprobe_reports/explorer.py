"""The operands as page.js explores them: columns, series, histograms, what-ifs, and the measures to colour by."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.attribution.gaussian import GaussianReference, gaussian_reference
from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.numbers import power
from mxprobe.schema import Component, Rule
from mxprobe.trace.column_arrays import Array

from . import names, packing, whatifs
from .gaussian_bands import bands
from .operands import Binned, Operands, Scan, dense
from .rows import Rows
from .sensitivities import Sensitivities

OPERAND_COLUMNS: tuple[str, ...] = (
    *("out_error", "out_scale", "out_deadzone", "out_grid", "out_zeroed", "out_saturated"),
    *("nmse", "sqnr_db", "scale", "deadzone", "grid", "zero_frac", "saturated_frac"),
    *("nmse_reference", "zeroed_reference", "sqnr_reference", "nmse_ratio"),
    *("sampled", "clusters"),
    *("predicted_kl", "rank_low", "rank_high"),
)

LINES: tuple[str, ...] = (
    *("scale", "deadzone", "grid", "out_scale", "out_deadzone", "out_grid", "out_zeroed", "out_saturated"),
    *("zero_frac", "saturated_frac", "signal", "output", "values"),
)
"""Per operand over bins of steps: parts of the error relative to the signal, shares of values, and the weights
(signal and output energy, count of values) with which bins add up exactly to any range of steps."""

_PARTS, _OUT_PARTS = ("scale", "deadzone", "grid"), ("out_scale", "out_deadzone", "out_grid")
RATIOS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "nmse": (_PARTS, (), "signal"),
    "out_error": (_OUT_PARTS, (), "output"),
    **{name: ((name,), _PARTS, "signal") for name in _PARTS},
    **{name: ((name,), _OUT_PARTS, "output") for name in (*_OUT_PARTS, "out_zeroed", "out_saturated")},
    **{name: ((name,), (), "values") for name in ("zero_frac", "saturated_frac")},
}
"""Columns that page.js makes anew for a range of steps or a rank, from `LINES`: which lines are added above, which
below (none: the weight), and the weight of a bin."""

ERROR_TICKS = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
SHARE_TICKS = [0.0, 0.25, 0.5, 0.75, 1.0]

PREDICTED_KL: dict[str, Any] = {
    "key": "predicted_kl",
    "label": "predicted KL, nats per token",
    "basis": "predicted",
    "log": True,
    "format": "number",
    "ticks": [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
    "help": "What this operand's error alone does to the policy, to first order: Delta2 / 2, from replays.",
}

MEASURES: list[dict[str, Any]] = [
    {
        "key": "out_error",
        "label": "output error",
        "log": True,
        "format": "percent",
        "ticks": ERROR_TICKS,
        "help": "‖GEMM output error‖² / ‖GEMM output‖² with this one operand quantized.",
    },
    {
        "key": "out_zeroed",
        "label": "output error made on zeroed values",
        "format": "percent",
        "ticks": SHARE_TICKS,
        "help": "Share of the output error made on values that were rounded to zero. It can exceed 100 % where the "
        "rest of the error cancels part of it.",
    },
    {
        "key": "out_scale",
        "label": "output error an ideal scale would remove",
        "format": "percent",
        "ticks": SHARE_TICKS,
        "help": "Remainder split of the output error: what real-valued scales in place of powers of two would remove.",
    },
    {
        "key": "out_grid",
        "label": "output error of the grid",
        "format": "percent",
        "ticks": SHARE_TICKS,
        "help": "Remainder split of the output error: what stays with ideal scales and nothing lost to zero.",
    },
    {
        "key": "out_saturated",
        "label": "output error made on clipped values",
        "format": "percent",
        "ticks": SHARE_TICKS,
        "help": "Share of the output error made on values beyond six times their block's scale.",
    },
    {
        "key": "nmse_ratio",
        "label": "operand error relative to Gaussian",
        "format": "times",
        "log": True,
        "diverging": True,
        "ticks": [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
        "help": "‖Q(x) − x‖² / ‖x‖² over the same ratio for Gaussian data of this tensor's magnitude. "
        "The error of a tensor is not the error of its product: a single outlier makes it small.",
    },
    {
        "key": "zero_frac",
        "label": "values rounded to zero",
        "format": "percent",
        "ticks": SHARE_TICKS,
        "help": "Share of non-zero values that became zero. Gaussian data: about 11 %.",
    },
]

_BY_COMPONENT = {
    Component.DEADZONE: "out_zeroed",
    Component.SCALE: "out_scale",
    Component.GRID: "out_grid",
    Component.SATURATION: "out_saturated",
}


_B_OVER_A: dict[str, Any] = {
    "key": "b_over_a",
    "label": "output error, B relative to A",
    "format": "times",
    "log": True,
    "diverging": True,
    "ticks": [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
    "help": "Output error of run B over that of run A, all steps of each. Below 1: B has less.",
}


def measures(sensitivities: Sensitivities | None = None, *, has_b: bool) -> list[dict[str, Any]]:
    """Return what the heatmaps can show."""
    offered = [*([PREDICTED_KL] if sensitivities else []), *MEASURES, *([_B_OVER_A] if has_b else [])]
    return [{**each, "ticktext": [_TICKS[each["format"]](tick) for tick in each["ticks"]]} for each in offered]


_TICKS: dict[str, Callable[[float], str]] = {
    "percent": lambda tick: f"{100 * tick:g} %",
    "number": lambda tick: power(round(math.log10(tick))),
    "times": lambda tick: f"{tick:g} ×",
}


def hurts(sensitivities: Sensitivities | None) -> str:
    """Return what the first heatmap shows: predicted KL, unless replays say that its first order does not hold."""
    return "predicted_kl" if sensitivities is not None and sensitivities.holds is not False else "out_error"


def default_measure(component: Component) -> str:
    """Return what the second heatmap shows first: the evidence for the named component."""
    return _BY_COMPONENT.get(component, "out_zeroed")


def columns(operands: Operands, sensitivities: Sensitivities | None = None) -> pd.DataFrame:
    """Return one row per operand, columns `OPERAND_COLUMNS`; errors are relative energies, shares fractions."""
    totals = operands.totals
    frame = pd.concat([ratios.tensor_ratios(totals), ratios.output_ratios(totals)], axis=1)
    references = [_reference(*operand) for operand in zip(frame["log2_rms"], totals["rule"], strict=True)]
    frame["nmse_reference"] = [reference.nmse for reference in references]
    frame["zeroed_reference"] = [reference.zero_frac for reference in references]
    frame["sqnr_reference"] = [reference.sqnr_db for reference in references]
    frame["nmse_ratio"] = frame["nmse"] / frame["nmse_reference"]
    frame["sampled"] = totals["sampled_frac"]
    frame["clusters"] = totals["n_clusters"]
    for name in ("predicted_kl", "rank_low", "rank_high"):
        frame[name] = np.nan if sensitivities is None else getattr(sensitivities, name)
    return frame[list(OPERAND_COLUMNS)].astype(float)


def lines(n_operands: int, binned: Binned) -> dict[str, npt.NDArray[np.float64]]:
    """Return `LINES` as (n_operands, n_bins): components relative to the signal's energy add up to the error."""
    sums = binned.sums
    tensor, output = ratios.tensor_ratios(sums.reindex(columns=ratios.ADDITIVE)), ratios.output_ratios(sums)
    found = {name: tensor[name] * tensor["nmse"] for name in _PARTS}
    parts = (*_OUT_PARTS, "out_zeroed", "out_saturated")
    found |= {name: output[name] * output["out_error"] for name in parts}
    found |= {name: tensor[name] for name in ("zero_frac", "saturated_frac")}
    found |= {"signal": sums["sum_x2"], "output": sums["out_ref2"], "values": sums["n"]}
    return {name: dense(n_operands, binned, found[name]) for name in LINES}


def view(n_operands: int, binned: Binned) -> dict[str, Any]:
    """Return the lines of one rank, of all, or of another run, for page.js."""
    columns = {name: packing.pack(values) for name, values in lines(n_operands, binned).items()}
    return {"label": binned.label, "steps": packing.pack(binned.steps), "columns": columns}


def page_data(
    operands: Operands,
    seen: Scan,
    whatif: Rows,
    tensors: Rows,
    *,
    sensitivities: Sensitivities | None = None,
    b_error: Array | None = None,
) -> dict[str, Any]:
    """Return all that page.js needs to explore operands. The operand selected first is the worst of the forward.

    `b_error` is the output error (n_operands,) of a run that lies over this one: relative to this one's a measure too.
    """
    frame = columns(operands, sensitivities)
    corrections, left = whatifs.collect(whatif, tensors, seen, operands)
    rules = sorted(set(operands.totals["rule"]))
    blocks = operands.delta.sum(axis=1, keepdims=True)
    delta = operands.delta / np.where(blocks > 0, blocks, 1)
    shown = dict(frame) if b_error is None else {**frame, "b_over_a": b_error / frame["out_error"]}
    packed = {name: packing.pack(np.asarray(values)) for name, values in shown.items()}
    return {
        "modules": {
            "names": operands.modules,
            "kinds": names.kinds_of(operands.modules),
            "blocks": [names.block_of(name) for name in operands.modules],
            "slugs": names.slugs(operands.modules),
        },
        "roles": [{"key": role, "label": ROLE_LABELS[role]} for role in operands.roles],
        "operands": {
            "module": [int(m) for m in operands.totals["module"]],
            "role": [int(r) for r in operands.totals["role"]],
            "rule": [rules.index(rule) for rule in operands.totals["rule"]],
            "columns": {**packed, "delta": packing.pack(delta)},
        },
        "bands": [bands(rule) for rule in rules],
        "views": [view(len(operands.totals), binned) for binned in (operands.binned, *operands.ranks)],
        "whatif": {
            "corrections": corrections,
            "columns": {name: packing.pack(values) for name, values in left.items()},
        },
        "ratios": RATIOS,
        "measures": measures(sensitivities, has_b=b_error is not None),
        "hurts": hurts(sensitivities),
        "selected": _first_selected(operands, frame, hurts(sensitivities)),
    }


def _first_selected(operands: Operands, frame: pd.DataFrame, key: str) -> dict[str, int]:
    if frame.empty:
        return {"module": -1, "role": -1}
    forward = np.isin(
        np.asarray(operands.totals["role"]), [i for i, r in enumerate(operands.roles) if r.endswith("_fwd")]
    )
    error = np.nan_to_num(np.asarray(frame[key], dtype=float), nan=-1.0)
    worst = int(np.argmax(np.where(forward, error, error - 1e9)))
    return {"module": int(operands.totals["module"].iloc[worst]), "role": int(operands.totals["role"].iloc[worst])}


def _reference(log2_rms: float, rule: str) -> GaussianReference:
    known = rule in {each.value for each in Rule}
    return gaussian_reference(float(log2_rms) if known else math.nan, rule if known else Rule.RCEIL)
