"""One decision from one weighting of the clusters: the order of science section 8, without words.

It runs once on all clusters and again on every resample, so that agreement is about the whole decision.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from mxprobe.schema import Component, Phase, Verdict

from .component import groups, name_component, operand_errors, where
from .corrections import KEEP, Situation, choose, score_corrections
from .measured import FORWARD_ROLES, Array, Measured
from .recommendation import CorrectionScore, OperandGroup
from .symptom import (
    Fit,
    Mismatch,
    RuleMismatch,
    far_modules,
    fit,
    mismatch,
    quantized_modules,
    rule_mismatch,
    share_of_far,
)
from .thresholds import Thresholds

Mask = npt.NDArray[np.bool_]


class Reason(StrEnum):
    """Why the verdict is what it is; chooses the words."""

    NO_ROWS = "no_rows"
    HIGH_PRECISION = "high_precision"
    NO_GENERATION = "no_generation"
    FEW_STEPS = "few_steps"
    ONE_PHASE = "one_phase"
    NO_SYMPTOM = "no_symptom"
    BEHIND = "behind"
    RULES = "rules"
    ELSEWHERE = "elsewhere"
    FAR = "far"
    REPLAYED = "replayed"
    NO_OPERANDS = "no_operands"
    CHOSEN = "chosen"


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    reason: Reason
    mismatch: Mismatch
    rules: RuleMismatch
    fits: tuple[Fit, ...]
    component: Component
    shares: dict[str, float]
    where: tuple[OperandGroup, ...]
    named: Mask
    """[M, R] operands in `where`."""
    scores: tuple[CorrectionScore, ...]
    chosen: tuple[str, ...]
    situation: Situation | None

    def signature(self) -> tuple[Verdict, Component | None, frozenset[str]]:
        """What two resamples must share to agree."""
        acts = self.verdict in (Verdict.ENABLE, Verdict.UNDECIDED, Verdict.KEEP_HIGH_PRECISION)
        return self.verdict, self.component if acts else None, frozenset(self.chosen)


def decide(measured: Measured, weights: Array, thresholds: Thresholds, *, with_whatifs: bool = True) -> Decision:
    """Apply the verdict's steps in their order to clusters weighted by `weights` [T].

    Without what-ifs, component and corrections are left out where the verdict does not need them.
    """
    observed = mismatch(measured, weights)
    quantized = quantized_modules(measured, weights, thresholds)
    fits = tuple(fit(measured, weights, thresholds))
    verdict, reason = _gates(measured, weights, observed, quantized, fits, thresholds)
    if verdict is not None and not with_whatifs:
        parts = _Parts.none(measured)
    else:
        parts = _Parts.of(measured, weights, thresholds, observed, quantized, fits, reason)
    chosen: tuple[str, ...] = ()
    if verdict is None:
        verdict, reason, chosen = _choice(parts)
    return Decision(
        verdict=verdict,
        reason=reason,
        mismatch=observed,
        rules=rule_mismatch(measured),
        fits=fits,
        component=parts.component,
        shares=parts.shares,
        where=parts.where,
        named=parts.named,
        scores=parts.scores,
        chosen=chosen,
        situation=parts.situation,
    )


def _gates(
    measured: Measured,
    weights: Array,
    observed: Mismatch,
    quantized: dict[Phase, Mask],
    fits: tuple[Fit, ...],
    thresholds: Thresholds,
) -> tuple[Verdict | None, Reason]:
    """Steps 1 to 4; no verdict yet when there is a symptom that rounding explains."""
    realised = [sums.realised(weights) for sums in measured.outputs.values()]
    if not any(np.isfinite(error).any() for error in realised):
        return Verdict.NOT_ENOUGH_EVIDENCE, Reason.NO_ROWS
    if not any(mask.any() for mask in quantized.values()):
        if measured.lacks_generation:
            return Verdict.NOT_ENOUGH_EVIDENCE, Reason.NO_GENERATION
        return Verdict.NOTHING_QUANTIZED, Reason.HIGH_PRECISION
    if measured.n_steps < thresholds.min_steps:
        return Verdict.NOT_ENOUGH_EVIDENCE, Reason.FEW_STEPS
    if observed.n_modules == 0:
        return Verdict.NOT_ENOUGH_EVIDENCE, Reason.ONE_PHASE
    log_probs = measured.sides.seen(weights)
    if not measured.sides.behind and rule_mismatch(measured).share >= thresholds.far_share:
        return Verdict.NOT_EXPLAINED, Reason.RULES
    if not (log_probs.is_symptom(weights, thresholds) if log_probs else observed.is_symptom(thresholds)):
        return Verdict.NONE_NEEDED, Reason.NO_SYMPTOM
    if measured.sides.behind:
        return Verdict.NOT_EXPLAINED, Reason.BEHIND
    if observed.n_same_recipe == observed.n_modules or not _in_the_layers(observed, thresholds):
        return Verdict.NOT_EXPLAINED, Reason.ELSEWHERE
    far = far_modules(fits, len(measured.modules))
    if any(each.far_share >= thresholds.far_share for each in fits):
        return Verdict.NOT_EXPLAINED, Reason.FAR
    if share_of_far(observed, far) > thresholds.unexplained:
        return Verdict.NOT_EXPLAINED, Reason.FAR
    replayed = measured.explained
    if replayed is not None and 1.0 - replayed.high > thresholds.unexplained:  # NaN where withheld: no gate
        return Verdict.NOT_EXPLAINED, Reason.REPLAYED
    return None, Reason.CHOSEN


def _in_the_layers(observed: Mismatch, thresholds: Thresholds) -> bool:
    """Whether layers disagree enough to set the policies apart: fewer than half, or one by much, in a local fault."""
    return (
        observed.is_symptom(thresholds)
        or observed.share_above(observed.gate(thresholds)) >= thresholds.mismatch_share
        or observed.share_above(max(thresholds.mismatch_one, observed.gate(thresholds))) > 0
    )


def _choice(parts: "_Parts") -> tuple[Verdict, Reason, tuple[str, ...]]:
    if not parts.scores:
        return Verdict.NOT_ENOUGH_EVIDENCE, Reason.NO_OPERANDS, ()
    chosen = choose(parts.scores)
    if chosen == (KEEP,):
        return Verdict.KEEP_HIGH_PRECISION, Reason.CHOSEN, chosen
    return Verdict.ENABLE if len(chosen) == 1 else Verdict.UNDECIDED, Reason.CHOSEN, chosen


@dataclass(frozen=True)
class _Parts:
    """Steps 5 and 6 before the choice: also computed where nothing is wrong, as what-ifs.

    Not where rounding does not explain what the layers do: its components and corrections would be beside the point.
    """

    component: Component
    shares: dict[str, float]
    where: tuple[OperandGroup, ...]
    named: Mask
    scores: tuple[CorrectionScore, ...]
    situation: Situation | None

    @classmethod
    def none(cls, measured: Measured) -> "_Parts":
        nothing = np.zeros((len(measured.modules), len(FORWARD_ROLES)), dtype=np.bool_)
        return cls(Component.NONE, {}, (), nothing, (), None)

    @classmethod
    def of(
        cls,
        measured: Measured,
        weights: Array,
        thresholds: Thresholds,
        observed: Mismatch,
        quantized: dict[Phase, Mask],
        fits: tuple[Fit, ...],
        reason: Reason,
    ) -> "_Parts":
        operands = measured.operands
        if operands is None or reason in (Reason.FAR, Reason.BEHIND, Reason.RULES, Reason.ELSEWHERE):
            return cls.none(measured)
        shape = (len(measured.modules), len(FORWARD_ROLES))
        counted = _counted_operands(measured, quantized)
        if reason is Reason.CHOSEN:
            counted = _that_differ(counted, observed, far_modules(fits, len(measured.modules)))
        errors = operand_errors(operands, weights)
        shares = errors.shares(counted)
        component = name_component(shares, thresholds)
        named_groups = where(groups(errors, measured.modules, counted, thresholds), errors, component, thresholds)
        named = np.zeros(shape, dtype=np.bool_)
        for _, members in named_groups:
            named |= members
        situation = Situation(
            operands=operands,
            mismatch=observed.per_module if reason is Reason.CHOSEN else np.full(shape[0], np.nan),
            gate=observed.gate(thresholds),
            share=None if observed.median > observed.gate(thresholds) else _share_to_get_under(observed, thresholds),
            counted=counted,
        )
        scores = score_corrections(situation, weights, named, component, thresholds)
        return cls(component, shares, tuple(group for group, _ in named_groups), named, tuple(scores), situation)


def _share_to_get_under(observed: Mismatch, thresholds: Thresholds) -> float:
    """Part of the Linears that may stay over the gate: less than `mismatch_share`, or none where fewer are over."""
    over = observed.share_above(observed.gate(thresholds))
    return thresholds.mismatch_share if over >= thresholds.mismatch_share else np.nextafter(0.0, 1.0)


def _that_differ(counted: Mask, observed: Mismatch, far: Mask) -> Mask:
    """Without modules that provably compute the same function on both sides, which set nothing apart, and without those
    that are far from what rounding does: no correction of it mends them."""
    differ = counted & ((observed.per_module != 0.0) & ~far)[:, None]
    return differ if differ.any() else counted


def _counted_operands(measured: Measured, quantized: dict[Phase, Mask]) -> Mask:
    """[M, R] operands that the run quantizes, by the inferred recipes; all of them where it quantizes nothing."""
    counted = np.zeros((len(measured.modules), len(FORWARD_ROLES)), dtype=np.bool_)
    if not any(mask.any() for mask in quantized.values()):
        return ~counted
    for phase, mask in quantized.items():
        recipes = measured.outputs[phase].recipes
        for m in np.flatnonzero(mask):
            unknown = recipes[m] == ("none", "none")  # something is off, but no known recipe says which side
            counted[m] |= [unknown or side != "none" for side in recipes[m]]
    return counted
