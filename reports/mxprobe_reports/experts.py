"""Mixtures of experts: a layer's experts as quantiles, those that stand out by name, and the routing before them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mxprobe.attribution.mixture import Mixture, Standout

from .markup import Html, basis, card, number, percent, scope, table, tag
from .names import ROLE_LABELS, natural_key

MAX_STANDOUTS = 40
_SHOWN = {"x_fwd": "inputs", "w_fwd": "weights", "g_dgrad": "gradients"}
_MEASURES = {"output_error": "output error", "zeroed": "zeroed elements"}


def section(mixture: Mixture | None) -> Html:
    """Nothing where the trace holds no experts and no router."""
    if mixture is None or mixture.is_empty:
        return Html("")
    return card(
        "Experts and routing",
        *(tag("p", tag("strong", told), class_="note") for told in mixture.told),
        _layers(mixture),
        _standouts(mixture.standouts()),
        _routing(mixture),
        id="experts",
        kind=tag("span", scope("steps", "rank", "operands"), basis("measured")),
    )


def _layers(mixture: Mixture) -> Html:
    rows: list[list[object]] = []
    layers = mixture.layers()
    for module, phase in sorted(layers, key=lambda key: (natural_key(key[0]), key[1])):
        spread = layers[module, phase]
        tokens = spread.get(("x_fwd", "rows"))
        if tokens is None:
            continue
        row: list[object] = [tag("code", module), phase, f"{tokens['n_called']:.0f} of {tokens['n_experts']:.0f}"]
        row += [number(tokens["n_measured"]), number(tokens["n_one_token"]), _range(tokens, number)]
        row += [_range(spread.get((role, "output_error")), percent) for role in _SHOWN]
        rows.append(row)
    if not rows:
        return Html("")
    head = ["experts of", "phase", "called", "measured", "with one token", "tokens of an expert"]
    head += [f"output error, {words}" for words in _SHOWN.values()]
    note = (
        "Averages over probed steps and ranks. Ranges are minimum – median – maximum over the experts measured. Output "
        "error: of one operand rounded, ‖E B‖² / ‖A B‖² of each expert's own product. Elsewhere on this page the "
        "experts of a layer are one row, their sums added."
    )
    return table(head, rows, numeric=range(2, len(head)), class_="compact") + tag("p", note, class_="note")


def _range(quantiles: Mapping[str, float] | None, words: Callable[[float], str]) -> str:
    return "–" if quantiles is None else " – ".join(words(quantiles[name]) for name in ("q0", "q50", "q100"))


def _standouts(found: list[Standout]) -> Html:
    title = tag("h3", "Experts that stand out")
    if not found:
        return title + tag("p", "None is far from the others of its layer.", class_="note")
    ranks = len({each.rank for each in found}) > 1
    rows = [
        [
            tag("code", each.module),
            *([each.rank] if ranks else []),
            each.expert,
            ROLE_LABELS.get(each.role, each.role),
            each.phase,
            _MEASURES[each.measure],
            percent(each.value),
            percent(each.median),
        ]
        for each in found[:MAX_STANDOUTS]
    ]
    rest = len(found) - len(rows)
    more = tag("p", f"{rest} more.", class_="note") if rest > 0 else ""
    head = ["layer", *(["rank"] if ranks else []), "expert", "operand", "phase", "measure", "this expert"]
    head.append("its layer's median")
    numeric = (*range(1, 2 + ranks), len(head) - 2, len(head) - 1)
    return title + table(head, rows, numeric=numeric, class_="compact") + more


def _routing(mixture: Mixture) -> Html:
    if not mixture.routing:
        return Html("")
    rows = [
        _router(row, mixture.flips.get(str(row["module"])) if row["phase"] == "train" else None)
        for row in sorted(mixture.routing, key=lambda row: (natural_key(str(row["module"])), str(row["phase"])))
    ]
    head = ["router", "phase", "tokens", "mean margin", "logit error, predicted", "logit error, as run"]
    head += ["flips expected", "flips predicted", "flips observed", "flips between generation and training"]
    note = (
        "Margin: the k-th largest logit less the next. Logit error: root mean square of the logits' error over that "
        "of the logits, the mean over experts taken off; predicted with both operands of the router rounded. Flips: "
        "tokens sent to other experts than exact logits of the same input would send them to: expected by margin "
        "and size of the predicted error alone, predicted by rounding, observed as the run computed. A dash: not "
        "measured, or the experts are chosen by more than the largest logits. Between generation and training: the "
        "same tokens, whatever made their inputs differ."
    )
    return (
        tag("h3", "Routing")
        + table(head, rows, numeric=range(2, len(head)), class_="compact")
        + tag("p", note, class_="note")
        + _flipped(mixture)
    )


def _router(row: Mapping[str, Any], flips: Mapping[str, Any] | None) -> list[object]:
    n, scale = row["n_tokens"], max(row["sum_logit2"], 1e-300)
    errors = [math.sqrt(row[name] / scale) for name in ("sum_error2", "sum_ran_error2")]
    counted = [row[name] / n if row["by_logits"] else math.nan for name in ("n_predicted", "n_observed")]
    between = math.nan if flips is None or not flips["n_tokens"] else flips["n_flipped"] / flips["n_tokens"]
    shares = [percent(each) for each in (*errors, row["sum_chance"] / n, *counted, between)]
    return [tag("code", row["module"]), row["phase"], f"{n:.0f}", number(row["sum_margin"] / n), *shares]


def _flipped(mixture: Mixture) -> Html:
    share = mixture.flipped
    if share is None:
        return Html("")
    words = (
        f"Of {share.n_tokens} sampled tokens {percent(share.tokens_frac)} were predicted where a router chose other "
        f"experts in training than in generation; they hold {percent(share.mismatch_frac)} of the squared "
        "log-probability difference."
    )
    return tag("p", words, " ", basis("associated"), class_="note")
