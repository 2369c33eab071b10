"""Where it hurts and where the error is: layers by operands, the worst operands, the split by operand role."""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import ratios
from mxprobe.numbers import number, percent
from mxprobe.schema import Component, Verdict

from .explorer import default_measure, hurts, measures
from .gaussian_bands import bands
from .operands import Operands
from .rendering import render
from .sensitivities import Sensitivities

N_WORST = 5
PARTS = ("scale", "deadzone", "grid")
_WORST_TITLES = {
    "predicted_kl": "predicted KL",
    "out_error": "output error",
    "out_zeroed": "on zeroed",
    "zero_frac": "zeroed values",
}
_SPELL = {"number": number, "percent": percent}


def section(
    operands: Operands,
    frame: pd.DataFrame,
    component: Component,
    verdict: Verdict,
    *,
    sensitivities: Sensitivities | None = None,
    has_b: bool = False,
) -> Markup:
    """Return two cards side by side.

    `frame` is `explorer.columns(operands, sensitivities)`; `has_b` says that a run lies over this one.
    """
    key, chosen = hurts(sensitivities), default_measure(component)
    offered = measures(sensitivities, has_b=has_b)
    basis, text = _basis(operands, verdict, sensitivities)
    columns = ("predicted_kl", "out_error", "out_zeroed") if key == "predicted_kl" else tuple(_WORST_TITLES)[1:]
    return render(
        "errors.html",
        hurts=next(each for each in offered if each["key"] == key),
        hurts_basis=basis,
        hurts_text=text,
        worst_columns=[{"key": name, "title": _WORST_TITLES[name], "format": _format(name)} for name in columns],
        worst=_worst(operands, frame, columns),
        measures=[each for each in offered if each["key"] != key],
        measure=next(each for each in offered if each["key"] == chosen),
        parts=PARTS,
        split=_split(operands),
        gaussian=[each for rule in sorted(set(operands.totals["rule"])) if (each := _gaussian(rule))],
    )


def _format(column: str) -> str:
    """Return the spelling of a column, by its name in Python and in the page script."""
    return "number" if column == "predicted_kl" else "percent"


def _basis(operands: Operands, verdict: Verdict, sensitivities: Sensitivities | None) -> tuple[tuple[str, str], str]:
    """Say how the first heatmap came about, with the sentence below it."""
    if sensitivities is not None and hurts(sensitivities) == "predicted_kl":
        return ("predicted", "KL of each operand alone"), sensitivities.sentence()
    if verdict is Verdict.NOTHING_QUANTIZED:
        named = f"Nothing is quantized here: this is what {', '.join(operands.quantizers)} would do to these tensors."
        return ("predicted", "output error"), named
    unknown = "How much the policy feels each was not measured (attach with --sensitivity-every)."
    felt = unknown if sensitivities is None else sensitivities.sentence()
    return ("measured", "output error"), f"By output error, each operand quantized alone. {felt}"


def _worst(operands: Operands, frame: pd.DataFrame, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the operands with the largest first column, as the page script orders them too."""
    largest = np.argsort(-np.nan_to_num(frame[columns[0]].to_numpy(dtype=float), nan=-1.0))[:N_WORST]
    rows: list[dict[str, Any]] = []
    for i in largest:
        module, role = (int(operands.totals[name].iloc[i]) for name in ("module", "role"))
        values = [_SPELL[_format(name)](float(frame[name].iloc[i])) for name in columns]
        rows.append({"module": operands.modules[module], "role": operands.roles[role], "values": values})
    return rows


def _split(operands: Operands) -> list[dict[str, Any]]:
    """Return the remainder split of the output error, added over the modules of each role."""
    sums = operands.totals.groupby("role")[list(ratios.ADDITIVE)].sum(min_count=1)
    split = ratios.output_ratios(sums)
    return [
        {
            "role": operands.roles[int(role)],
            "error": row["out_error"],
            **_bar({name: float(row[f"out_{name}"]) for name in PARTS}),
        }
        for role, row in zip(split.index, split.to_dict("records"), strict=True)
    ]


def _gaussian(rule: str) -> dict[str, Any]:
    """Return the split of Gaussian data under a rule; empty for an unknown one."""
    band = bands(rule)
    return {"rule": rule, "band": band["nmse"], **_bar({name: sum(band[name]) / 2 for name in PARTS})} if band else {}


def _bar(shares: dict[str, float]) -> dict[str, Any]:
    """Return widths in percent of the positive shares, and all of them in words; no words where one is not measured."""
    if not all(np.isfinite(share) for share in shares.values()):
        return {"shares": [], "words": ""}
    words = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    if shares["scale"] < 0:
        words += " (no scale problem: the power-of-two scales do better than amax/6)"
    positive = {name: share for name, share in shares.items() if share > 0}
    whole = sum(positive.values())
    return {"shares": [(name, 100 * share / whole) for name, share in positive.items()], "words": words}
