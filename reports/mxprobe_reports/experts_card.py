"""Mixtures of experts: a layer's experts as quantiles, those that stand out by name, and the routing before them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from mxprobe.attribution.mixture import Mixture, Standout
from mxprobe.attribution.words import ROLE_LABELS
from mxprobe.numbers import NOTHING, number, percent

from .names import natural_key
from .rendering import render

MAX_STANDOUTS = 40
_SHOWN = ("x_fwd", "w_fwd", "g_dgrad")
_MEASURES = {"output_error": "output error", "zeroed": "zeroed elements"}


def section(mixture: Mixture | None) -> Markup:
    """Return nothing where the trace holds no experts and no router."""
    if mixture is None or mixture.is_empty:
        return Markup()
    found = mixture.standouts()
    has_ranks = len({each.rank for each in found}) > 1
    routing = sorted(mixture.routing, key=lambda row: (natural_key(str(row["module"])), str(row["phase"])))
    return render(
        "experts.html",
        mixture=mixture,
        layers=_layers(mixture),
        standouts=[_standout(each, has_ranks=has_ranks) for each in found[:MAX_STANDOUTS]],
        standouts_numeric=(*range(1, 2 + has_ranks), 5 + has_ranks, 6 + has_ranks),
        has_ranks=has_ranks,
        n_more=len(found) - MAX_STANDOUTS,
        routing=[
            _router(row, mixture.flips.get(str(row["module"])) if row["phase"] == "train" else None) for row in routing
        ],
    )


def _layers(mixture: Mixture) -> list[list[object]]:
    rows: list[list[object]] = []
    layers = mixture.layers()
    for module, phase in sorted(layers, key=lambda key: (natural_key(key[0]), key[1])):
        spread = layers[module, phase]
        tokens = spread.get(("x_fwd", "rows"))
        if tokens is None:
            continue
        row: list[object] = [module, phase, f"{tokens['n_called']:.0f} of {tokens['n_experts']:.0f}"]
        row += [number(tokens["n_measured"]), number(tokens["n_one_token"]), _range(tokens, number)]
        row += [_range(spread.get((role, "output_error")), percent) for role in _SHOWN]
        rows.append(row)
    return rows


def _range(quantiles: Mapping[str, float] | None, spell: Callable[[float], str]) -> str:
    return NOTHING if quantiles is None else " – ".join(spell(quantiles[name]) for name in ("q0", "q50", "q100"))


def _standout(each: Standout, *, has_ranks: bool) -> list[object]:
    place = [each.module, *([each.rank] if has_ranks else []), each.expert]
    operand = [ROLE_LABELS.get(each.role, each.role), each.phase, _MEASURES[each.measure]]
    return [*place, *operand, percent(each.value), percent(each.median)]


def _router(row: Mapping[str, Any], flips: Mapping[str, Any] | None) -> list[object]:
    n, scale = row["n_tokens"], max(row["sum_logit2"], 1e-300)
    errors = [math.sqrt(row[name] / scale) for name in ("sum_error2", "sum_ran_error2")]
    counted = [row[name] / n if row["by_logits"] else None for name in ("n_predicted", "n_observed")]
    between = None if flips is None or not flips["n_tokens"] else flips["n_flipped"] / flips["n_tokens"]
    shares = [percent(each) for each in (*errors, row["sum_chance"] / n, *counted, between)]
    return [row["module"], row["phase"], f"{n:.0f}", number(row["sum_margin"] / n), *shares]
