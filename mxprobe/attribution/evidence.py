"""The facts behind a verdict, each with how it came about: measured, predicted, or merely associated."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.metrics import Series, preferred
from mxprobe.numbers import number, p_value, whole_percent
from mxprobe.schema import Component, Phase, Role
from mxprobe.tables import OUTPUT_SUMS
from mxprobe.trace import Trace

from . import ratios
from .decision import Decision, Reason
from .held_versions import MAX_NAMED, WRONG, held_versions, held_words
from .layer_divergence import FACTOR, first_divergence
from .measured import Measured
from .recommendation import Certainty, Coverage, Evidence
from .symptom import far_modules, share_of_far
from .temperature import effective_temperature
from .thresholds import Thresholds
from .token_mismatch import behind_words
from .trends import ALPHA, find_step, mann_kendall
from .weight_changes import weight_changes
from .words import COMPONENT_WORDS, listed, place

_TRENDS = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "mismatch_logp_abs_mean": "|log-probability mismatch|",
}
MAX_FAR_NAMES = 4
_BACKWARD = (Role.G_DGRAD, Role.W_DGRAD, Role.G_WGRAD, Role.X_WGRAD)


def collect(
    trace: Trace, measured: Measured, decision: Decision, coverage: Coverage, thresholds: Thresholds
) -> tuple[Evidence, ...]:
    """All evidence in the order of the verdict's steps."""
    return (
        _coverage(coverage),
        Evidence(
            "probed_steps",
            Certainty.MEASURED,
            f"{measured.n_steps} probed steps",
            float(measured.n_steps),
            float(thresholds.min_steps),
            measured.n_steps >= thresholds.min_steps,
        ),
        *_generation(measured),
        *_quantized(measured, thresholds),
        *_log_probs(measured, thresholds),
        *_temperature(trace),
        *_explained(measured, thresholds),
        *_mismatch(decision, thresholds),
        *_weight_lag(measured),
        *_held_weights(trace),
        *_noise(trace.events()),
        *_divergence(trace),
        *_rules(decision, thresholds),
        *_fit(decision, measured, thresholds),
        *_component(decision, thresholds),
        *_backward(trace),
        *_trends(trace.signals()),
    )


def _coverage(coverage: Coverage) -> Evidence:
    text = f"{coverage.n_probed} of {coverage.n_modules} modules with weight GEMMs probed"
    if coverage.flops_frac is None:
        return Evidence("coverage", Certainty.MEASURED, text + "; their share of the FLOPs is not known")
    return Evidence(
        "coverage",
        Certainty.MEASURED,
        f"0 % covered, because {coverage.because}"
        if coverage.because
        else f"{whole_percent(coverage.flops_frac)} of forward GEMM FLOPs seen ({text})",
        coverage.flops_frac,
    )


def _generation(measured: Measured) -> Iterator[Evidence]:
    if measured.lacks_generation:
        text = "no forward pass was recognised as part of a generation; events of kind `phases` say what each was"
        yield Evidence("generation", Certainty.MEASURED, text, 0.0, None, False)


def _quantized(measured: Measured, thresholds: Thresholds) -> Iterator[Evidence]:
    weights = np.ones(measured.n_clusters)
    for phase, sums in measured.outputs.items():
        error = sums.realised(weights)
        seen = error[np.isfinite(error)]
        if not seen.size:
            continue
        recipes = pd.Series(
            [
                _recipe_words(recipe, is_exact=bool(exact))
                for recipe, exact in zip(sums.recipes, sums.is_exact, strict=True)
                if recipe != ("", "")
            ]
        )
        common = [f"{name} in {count}" for name, count in recipes.value_counts().items()]
        yield Evidence(
            f"realised_error_{phase}",
            Certainty.MEASURED,
            f"{phase}: {int((seen > thresholds.quantized_error).sum())} of {seen.size} modules differ from their "
            f"high-precision product, median error {number(float(np.median(seen)))}; recipes {listed(common)}",
            float(np.median(seen)),
            thresholds.quantized_error,
            bool((seen > thresholds.quantized_error).any()),
        )


def _recipe_words(recipe: tuple[str, str], *, is_exact: bool) -> str:
    x, w = recipe
    name = x if x == w else f"x {x}, W {w}"
    return name if is_exact else f"none known, closest {name},"


def _log_probs(measured: Measured, thresholds: Thresholds) -> Iterator[Evidence]:
    weights = np.ones(measured.n_clusters)
    seen = measured.sides.seen(weights)
    if seen is None:
        return
    difference, loss = seen.abs_d(weights), seen.ess_loss(weights)
    yield Evidence(
        "log_prob_mismatch",
        Certainty.MEASURED,
        f"mean |log p in rollout - in training| of {seen.n_tokens(weights):.0f} sampled tokens is "
        f"{number(difference)} nats, KL {number(seen.kl(weights))} nats a token (k3); {seen.floor_words(weights)}",
        difference,
        seen.gate(thresholds),
        difference > seen.gate(thresholds),
    )
    yield Evidence(
        "effective_sample_size",
        Certainty.MEASURED,
        f"{whole_percent(loss)} of the effective sample size is lost to the difference of rollout and trainer",
        loss,
        thresholds.ess_loss,
        loss > thresholds.ess_loss,
    )
    drift = seen.drift()
    if drift is not None:
        yield Evidence(
            "mismatch_drift",
            Certainty.ASSOCIATED,
            f"the mismatch of the last quarter of the probed steps is {drift:.2g} times that of the first, mean |d|",
            drift,
        )


def _temperature(trace: Trace) -> Iterator[Evidence]:
    rows = trace.rollouts()
    if rows.empty:
        return
    found = effective_temperature(rows)
    if found.withheld:
        yield Evidence("effective_temperature", Certainty.MEASURED, f"effective temperature withheld: {found.withheld}")
        return
    interval = f"[{found.low:.3f}, {found.high:.3f}]" if math.isfinite(found.low) else "no interval from one step"
    yield Evidence(
        "effective_temperature",
        Certainty.MEASURED,
        f"the rollout samples like the trainer's policy at {found.value:.3f} times its temperature ({interval}, "
        f"{found.n_steps} steps, {found.n_tokens} tokens; above 1: flatter)",
        found.value,
    )


def _explained(measured: Measured, thresholds: Thresholds) -> Iterator[Evidence]:
    found = measured.explained
    if found is None:
        return
    name = "mismatch_explained"
    if found.withheld:
        yield Evidence(name, Certainty.PREDICTED, f"what rounding explains of the mismatch: withheld: {found.withheld}")
        return
    share = min(found.share, 1.0)
    interval = f" [{found.low:.2f}, {found.high:.2f}]" if math.isfinite(found.low) else ""
    yield Evidence(
        name,
        Certainty.PREDICTED,
        f"rounding explains {whole_percent(share)} of the mismatch of log-probabilities, "
        f"{whole_percent(1.0 - share)} is not explained: mean d^2 is {number(found.observed)} nats^2 a token, "
        f"{number(found.replayed)} where training batches are replayed with every Linear rounded (ratio "
        f"{found.share:.2f}{interval}, {found.n_steps} steps)",
        found.share,
        1.0 - thresholds.unexplained,
        found.share >= 1.0 - thresholds.unexplained,
    )


def _weight_lag(measured: Measured) -> Iterator[Evidence]:
    behind = measured.sides.behind
    if behind:
        text = f"in the rollout {behind_words(behind)}: its outputs are reproduced exactly with those"
        yield Evidence("weight_lag", Certainty.MEASURED, text, float(max(each.lag for each in behind)), 0.0, True)


def _held_weights(trace: Trace) -> Iterator[Evidence]:
    """Of an engine that was attached into the trainer's own trace."""
    held = held_versions(trace, trace)
    wrong = [each for each in held if each.state in WRONG]
    if wrong:
        text = f"{len(wrong)} of {len(held)} weights of the rollout engine are not the trainer's current ones, by their"
        more = f", and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        words = f"{text} codes: {held_words(wrong)}{more}"
        yield Evidence("held_weights", Certainty.MEASURED, words, float(len(wrong)), 0.0, True)


def _noise(events: pd.DataFrame) -> Iterator[Evidence]:
    found = weight_changes(events, Phase.ROLLOUT.value)
    if found:
        name, said = next(iter(found.items()))
        others = f", and {len(found) - 1} more modules" if len(found) > 1 else ""
        text = f"in the rollout {name}: {said}{others}; what this moves is no rounding, and wanted where noise is meant"
        yield Evidence("weight_noise", Certainty.MEASURED, text, float(len(found)))


def _rules(decision: Decision, thresholds: Thresholds) -> Iterator[Evidence]:
    rules = decision.rules
    if rules.n_modules:
        yield Evidence(
            "rule_mismatch",
            Certainty.MEASURED,
            f"{rules.n_modules} of {rules.n_both} modules that both sides quantize compute by "
            f"{rules.train} in training and by {rules.rollout} in the rollout, as their outputs show",
            rules.share,
            thresholds.far_share,
            rules.share >= thresholds.far_share,
        )


def _mismatch(decision: Decision, thresholds: Thresholds) -> Iterator[Evidence]:
    seen = decision.mismatch
    if not seen.n_modules:
        return
    gate = seen.gate(thresholds)
    text = (
        f"median |realised error in rollout - in training| over {seen.n_modules} Linears is {number(seen.median)}; "
        f"its floor between probed steps is {number(seen.floor)}"
    )
    if seen.n_same_recipe:
        text += f"; {seen.n_same_recipe} compute the same function on both sides (one exact recipe) and count as 0"
    value, share = seen.median, seen.share_above(gate)
    if value <= gate and share >= thresholds.far_share:
        needed = whole_percent(thresholds.far_share)
        text += f"; {whole_percent(share)} of them are over {number(gate)}; {needed} make a symptom"
        value = seen.reached_by(thresholds.far_share)
    elif value <= gate and seen.is_symptom(thresholds):
        value, gate = seen.largest, max(gate, thresholds.mismatch_alone)
        text += f"; that of a single one is {number(value)}, which makes a symptom by itself"
    yield Evidence("mismatch", Certainty.MEASURED, text, value, gate, seen.is_symptom(thresholds))


def _divergence(trace: Trace) -> Iterator[Evidence]:
    found = first_divergence(trace.layers())
    if found is None:
        return
    basis = "measured" if found.is_measured else "of its dtype's rounding"
    where = f"first apart behind {found.layer}, block {found.depth + 1} of {found.n_layers}"
    if found.layer is None:
        where = f"alike in all {found.n_layers} blocks"
    yield Evidence(
        "first_divergence",
        Certainty.MEASURED,
        f"the residual stream of the same prompt tokens in generation and in training is {where}: difference "
        f"{number(found.difference)} of its energy there, floor {number(found.floor)} ({basis})",
        found.difference,
        FACTOR**2 * found.floor,
        found.layer is not None,
    )


def _fit(decision: Decision, measured: Measured, thresholds: Thresholds) -> Iterator[Evidence]:
    for each in decision.fits:
        factor = f"{2.0**each.median_log2:.2f}" if math.isfinite(each.median_log2) else "unbounded"
        other = f"; of {each.n_unexplained} the error is mostly another one" if each.n_unexplained else ""
        names = [measured.modules[m] for m in np.flatnonzero(each.far)]
        which = f" ({listed(names)})" if 0 < len(names) <= MAX_FAR_NAMES else ""
        yield Evidence(
            f"realised_over_predicted_{each.phase}",
            Certainty.PREDICTED,
            f"{each.phase}: {each.n_far} of {each.n_quantized} quantized modules{which} are far from what their recipe "
            f"predicts (median realised/predicted {factor}); {each.n_exact} are reproduced exactly{other}",
            each.far_share,
            thresholds.far_share,
            each.far_share >= thresholds.far_share,
        )
    far = far_modules(decision.fits, len(measured.modules))
    if far.any() and decision.mismatch.n_modules:
        share = share_of_far(decision.mismatch, far)
        yield Evidence(
            "mismatch_of_far",
            Certainty.MEASURED,
            f"modules far from what their recipe predicts make {whole_percent(share)} of all Linears' mismatch",
            share,
            thresholds.unexplained,
            share > thresholds.unexplained,
        )


def _component(decision: Decision, thresholds: Thresholds) -> Iterator[Evidence]:
    if decision.component is Component.NONE:
        return
    shares = decision.shares
    measured = decision.reason not in (Reason.HIGH_PRECISION, Reason.NO_GENERATION)
    made_on = f"made on zeroed elements alone {shares['zeroed']:.2f} of it, on saturated ones {shares['saturated']:.2f}"
    split = f"scale {shares['scale']:.2f}, deadzone {shares['deadzone']:.2f}, grid {shares['grid']:.2f}"
    decisive = {Component.DEADZONE: "zeroed", Component.SATURATION: "saturated"}.get(
        decision.component, decision.component.value
    )
    yield Evidence(
        "component",
        Certainty.MEASURED if measured else Certainty.PREDICTED,
        f"output error of {'quantized' if measured else 'MXFP4'} operands: {made_on}; remainder split {split}: "
        f"{COMPONENT_WORDS[decision.component]}",
        shares.get(decisive),
        thresholds.component_share,
        decision.component is not Component.MIXED,
    )
    if decision.where:
        largest = max(group.output_error for group in decision.where)
        yield Evidence(
            "where",
            Certainty.MEASURED if measured else Certainty.PREDICTED,
            f"it is made in {place(decision.where)}; error up to {number(largest)} of the output's energy",
            largest,
        )


def _backward(trace: Trace) -> Iterator[Evidence]:
    by = ["module", "role"]
    sums = ratios.sums_of(trace, "tensors", by, OUTPUT_SUMS)
    sums = sums[sums["role"].isin([role.value for role in _BACKWARD])]
    if sums.empty:
        return
    error = ratios.output_ratios(sums)["out_error"].groupby(sums["role"].astype(str)).median()
    listing = listed(f"{role} {number(float(value))}" for role, value in error.items())
    yield Evidence(
        "backward",
        Certainty.PREDICTED,
        f"backward operands in this format would put these median errors into their GEMMs: {listing}. Whether the "
        "run quantizes its backward is not recorded, so this is a what-if and no symptom",
        float(error.max()),
    )


def _trends(signals: pd.DataFrame) -> Iterator[Evidence]:
    for metric, words in _TRENDS.items():
        rows = _one_series(signals[(signals["metric"] == metric) & np.isfinite(signals["value"])])
        if len(rows) < 8:
            continue
        values = rows["value"].to_numpy(dtype=float)
        quarter = len(values) // 4
        first, last = float(values[:quarter].mean()), float(values[-quarter:].mean())
        yield Evidence(
            f"trend_{metric}",
            Certainty.ASSOCIATED,
            f"{words} {number(first)} in the first quarter of the steps seen, {number(last)} in the last"
            f"{_tested(values)}: a trend in one run is no proof of a cause",
            last,
        )


def _tested(values: npt.NDArray[np.float64]) -> str:
    """`; rising (Mann-Kendall, p < 0.001), a step fits at point 40 of 200 (p 0.002)`."""
    trend, step = mann_kendall(values), find_step(values)
    said = f"; {trend.direction()} (Mann-Kendall, p {p_value(trend.p)})" if trend else ""
    if step is not None and step.p < ALPHA:
        said += f", a step fits at point {step.at} of {len(values)} (p {p_value(step.p)})"
    return said


def _one_series(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the one series to look at, by step: keys and sinks that mean the same are no further samples."""
    keys = rows[["source", "framework", "raw_key"]].astype(str)
    chosen = preferred(Series(*key) for key in keys.drop_duplicates().itertuples(index=False, name=None))
    if chosen is None:
        return rows
    same = (keys["source"] == chosen.source) & (keys["raw_key"] == chosen.raw_key)
    return rows[same & (keys["framework"] == chosen.framework)].sort_values("step")


def phases_seen(measured: Measured) -> str:
    """`training and rollout`, `training`, ... as seen in `outputs`."""
    names = {Phase.TRAIN: "training", Phase.ROLLOUT: "rollout"}
    return listed(names[phase] for phase in measured.outputs)
