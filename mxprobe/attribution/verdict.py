"""From a trace to a recommendation: the decision, its stability, its reasons and its words."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from mxprobe.numbers import whole_percent
from mxprobe.schema import Phase
from mxprobe.trace import Trace
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from . import evidence, ratios
from .catalogue import catalogue
from .coverage import coverage_of
from .decision import Decision, decide
from .devices import DEVICES
from .exclusion import BF16, MXFP8, ExclusionCurve, exclusion_curve
from .measured import Measured, measure
from .recommendation import CorrectionScore, Recommendation, Snippet
from .resampling import resample_agreement, with_held_out_gains
from .sentences import headline, what_would_change
from .snippets import FRAMEWORKS, Emulated, has_option, snippet_for
from .symptom import quantized_modules
from .thresholds import Thresholds
from .update_visibility import update_visibility


def recommend(
    trace: Trace, thresholds: Thresholds | None = None, *, framework: str | None = None, neighbours: bool = False
) -> Recommendation:
    """Judge a trace by the order of science section 8.

    Args:
        trace: an open trace, complete or not.
        thresholds: gates to use in place of the defaults.
        framework: whose knob the snippet uses; by default the one found in the trace.
        neighbours: whether to derive the columns of neighbouring papers too.

    Raises:
        UsageError: no snippets for that framework.
        TraceError: a table cannot be read.
    """
    thresholds = thresholds or Thresholds()
    measured = measure(trace)
    decision = decide(measured, np.ones(measured.n_clusters), thresholds)
    scores = with_held_out_gains(measured, decision, thresholds)
    coverage = coverage_of(trace.modules())
    return Recommendation(
        verdict=decision.verdict,
        headline=headline(decision, measured, thresholds),
        component=decision.component,
        shares=decision.shares,
        where=decision.where,
        chosen=decision.chosen,
        corrections=_ordered(_with_options(scores, _framework(trace, framework)), decision.chosen),
        evidence=evidence.collect(trace, measured, decision, coverage, thresholds),
        agreement=resample_agreement(measured, decision, thresholds),
        coverage=coverage,
        thresholds=thresholds,
        what_would_change=what_would_change(decision, measured, thresholds),
        snippet=_snippet(trace, measured, decision, thresholds, framework),
        caveats=tuple(_caveats(trace, measured, decision, thresholds)),
        exclusion=tuple(_exclusion(trace, _framework(trace, framework))),
        updates=update_visibility(trace.table("updates")),
        neighbours=catalogue(trace) if neighbours else (),
    )


def _ordered(scores: tuple[CorrectionScore, ...], chosen: tuple[str, ...]) -> tuple[CorrectionScore, ...]:
    def key(score: CorrectionScore) -> tuple[int, int, float]:
        first = chosen.index(score.correction) if score.correction in chosen else len(chosen)
        return first, score.tier, -score.gain if math.isfinite(score.gain) else math.inf

    return tuple(sorted(scores, key=key))


def _with_options(scores: tuple[CorrectionScore, ...], framework: str) -> tuple[CorrectionScore, ...]:
    """Scores with what the framework has an option for, and which of them no other beats in gain and cost."""

    def beaten(score: CorrectionScore) -> bool:
        return any(
            other.gain >= score.gain
            and other.cost_gemm <= score.cost_gemm
            and (other.gain, -other.cost_gemm) != (score.gain, -score.cost_gemm)
            for other in scores
        )

    return tuple(
        replace(score, engine_has_it=has_option(score.correction, framework), is_pareto=not beaten(score))
        for score in scores
    )


def _framework(trace: Trace, given: str | None) -> str:
    if given is not None:
        return given
    found = trace.signals()["framework"].dropna().astype(str)
    return next((name for name in found.unique() if name in FRAMEWORKS), "torch")


def _exclusion(trace: Trace, framework: str) -> Iterator[ExclusionCurve]:
    sensitivity = trace.sensitivity()
    if sensitivity.empty:
        return
    modules = trace.modules()
    tensors = ratios.sums_of(trace, "tensors", ("module", "role"), ("out_e2",))
    whatif = ratios.sums_of(trace, "whatif", ("module", "role", "correction"), ("out_e2",))
    for keep in (BF16, MXFP8):
        curve = exclusion_curve(sensitivity, modules, keep=keep, tensors=tensors, whatif=whatif, framework=framework)
        if curve is not None:
            yield curve


def _snippet(
    trace: Trace, measured: Measured, decision: Decision, thresholds: Thresholds, framework: str | None
) -> Snippet | None:
    framework = _framework(trace, framework)
    if not decision.chosen:
        return None
    quantized = quantized_modules(measured, np.ones(measured.n_clusters), thresholds)
    train = quantized.get(Phase.TRAIN)
    counted = decision.situation.counted if decision.situation else np.ones((1, 2), dtype=np.bool_)
    emulated = Emulated(
        x=bool(counted[:, 0].any()),
        w=bool(counted[:, 1].any()),
        rollout_only=train is not None and not train.any(),
    )
    return snippet_for(decision.chosen[0], decision.where, framework, emulated)


_WEIGHTED_BY = {
    False: "Layers are weighted by their relative output error; how sensitive the policy is to each was not measured, "
    "or not confirmed by replays (attach with --sensitivity-every and --replay-every).",
    True: "Layers are weighted by the KL that their error is predicted to make, to first order, in training batches.",
}


_MISMATCH_FROM = {
    False: "The mismatch is read from layer outputs: this trace holds no log-probabilities of rollout and trainer.",
    True: "Log-probabilities are of sampled tokens, without top-k, top-p and penalties on either side.",
}


def _caveats(trace: Trace, measured: Measured, decision: Decision, thresholds: Thresholds) -> list[str]:
    said = [
        _MISMATCH_FROM[measured.sides.log_probs is not None],
        _WEIGHTED_BY[measured.operands is not None and measured.operands.delta2 is not None],
        "Intervals and agreement treat probed steps as independent; training drifts, so they are somewhat narrow.",
        f"Costs are estimates from operation counts and the peak rates of an {DEVICES[thresholds.device].words} "
        "(--device), not measurements.",
    ]
    operands = measured.operands
    if operands is not None:
        if operands.phase is Phase.TRAIN and Phase.ROLLOUT in measured.outputs:
            said.append(
                "Operands were decomposed in the training forward; the rollout sees the same layers, other tokens."
            )
        said.extend(_rule_caveats(operands.rule, measured.outputs))
        sampled = trace.table("tensors", ("sampled_frac",))["sampled_frac"].min()
        if sampled < 1.0:
            said.append(f"Rows and features were sampled, down to {whole_percent(float(sampled))} of a tensor.")
    if any(Correction.parse(name).kind is CorrectionKind.OUTLIER_FALLBACK for name in decision.chosen):
        said.append(
            "Alpha of the outlier fallback was chosen by output error, which always prefers 1; the paper's 0.5 comes "
            "from rollout drift and accuracy."
        )
    return [*said, *trace.problems]


def _rule_caveats(rule: str, outputs: Mapping[Phase, object]) -> list[str]:
    if rule not in {known.value for known in Rule} or Rule(rule).covers_amax or not outputs:
        return []
    return [
        f"Under the scale rule {rule} the scale can be smaller than the ideal one: the components are then not "
        "orthogonal, and saturation is reported beside them."
    ]
