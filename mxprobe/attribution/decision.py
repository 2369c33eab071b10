"""The gates of the verdict, in the order in which they are asked, and the choice: one decision from one weighting.

It runs once on all clusters and again on every resample, so that agreement is about the whole decision.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from mxprobe.schema import Component, Phase, Verdict

from .component import groups, name_component, operand_errors, where
from .correction_scores import KEEP, Situation, choose, score_corrections
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
class WhatIfs:
    """Component, place and corrections: steps 5 and 6, also computed where nothing is wrong."""

    component: Component
    shares: dict[str, float]
    where: tuple[OperandGroup, ...]
    named: Mask
    """[M, R] operands in `where`."""
    scores: tuple[CorrectionScore, ...]
    situation: Situation | None


@dataclass(frozen=True)
class Decision(WhatIfs):
    verdict: Verdict
    reason: Reason
    mismatch: Mismatch
    rules: RuleMismatch
    fits: tuple[Fit, ...]
    chosen: tuple[str, ...]

    def signature(self) -> tuple[Verdict, Component | None, frozenset[str]]:
        """Return what two resamples must share to agree."""
        acts = self.verdict in (Verdict.ENABLE, Verdict.UNDECIDED, Verdict.KEEP_HIGH_PRECISION)
        return self.verdict, self.component if acts else None, frozenset(self.chosen)


def decide(measured: Measured, weights: Array, thresholds: Thresholds, *, with_whatifs: bool = True) -> Decision:
    """Apply the verdict's steps in their order to clusters weighted by `weights` [T].

    Without what-ifs, component and corrections are left out where the verdict does not need them.
    """
    seen = _Seen(
        measured,
        weights,
        thresholds,
        mismatch(measured, weights),
        rule_mismatch(measured),
        quantized_modules(measured, weights, thresholds),
        tuple(fit(measured, weights, thresholds)),
    )
    verdict, reason = seen.gates()
    whatifs = seen.whatifs(reason) if verdict is None or with_whatifs else seen.nothing()
    chosen: tuple[str, ...] = ()
    if verdict is None:
        verdict, reason, chosen = _choice(whatifs.scores)
    return Decision(
        **vars(whatifs),
        verdict=verdict,
        reason=reason,
        mismatch=seen.mismatch,
        rules=seen.rules,
        fits=seen.fits,
        chosen=chosen,
    )


def _choice(scores: tuple[CorrectionScore, ...]) -> tuple[Verdict, Reason, tuple[str, ...]]:
    if not scores:
        return Verdict.NOT_ENOUGH_EVIDENCE, Reason.NO_OPERANDS, ()
    chosen = choose(scores)
    if chosen == (KEEP,):
        return Verdict.KEEP_HIGH_PRECISION, Reason.CHOSEN, chosen
    return Verdict.ENABLE if len(chosen) == 1 else Verdict.UNDECIDED, Reason.CHOSEN, chosen


@dataclass(frozen=True)
class _Seen:
    """What clusters of one weighting show: what every step of the verdict looks at."""

    measured: Measured
    weights: Array
    thresholds: Thresholds
    mismatch: Mismatch
    rules: RuleMismatch
    quantized: dict[Phase, Mask]
    fits: tuple[Fit, ...]

    def gates(self) -> tuple[Verdict | None, Reason]:
        """Apply steps 1 to 4; there is no verdict yet where there is a symptom that rounding explains."""
        measured, observed, thresholds = self.measured, self.mismatch, self.thresholds
        realised = [sums.realised(self.weights) for sums in measured.outputs.values()]
        if not any(np.isfinite(error).any() for error in realised):
            return Verdict.NOT_ENOUGH_EVIDENCE, Reason.NO_ROWS
        if not any(mask.any() for mask in self.quantized.values()):
            if measured.lacks_generation:
                return Verdict.NOT_ENOUGH_EVIDENCE, Reason.NO_GENERATION
            return Verdict.NOTHING_QUANTIZED, Reason.HIGH_PRECISION
        if measured.n_steps < thresholds.min_steps:
            return Verdict.NOT_ENOUGH_EVIDENCE, Reason.FEW_STEPS
        if observed.n_modules == 0:
            return Verdict.NOT_ENOUGH_EVIDENCE, Reason.ONE_PHASE
        if not measured.sides.behind and self.rules.share >= thresholds.far_share:
            return Verdict.NOT_EXPLAINED, Reason.RULES
        log_probs = measured.sides.seen(self.weights)
        if not (log_probs.is_symptom(self.weights, thresholds) if log_probs else observed.is_symptom(thresholds)):
            return Verdict.NONE_NEEDED, Reason.NO_SYMPTOM
        if measured.sides.behind:
            return Verdict.NOT_EXPLAINED, Reason.BEHIND
        if observed.n_same_recipe == observed.n_modules or not self._is_in_the_layers():
            return Verdict.NOT_EXPLAINED, Reason.ELSEWHERE
        if any(each.far_share >= thresholds.far_share for each in self.fits):
            return Verdict.NOT_EXPLAINED, Reason.FAR
        if share_of_far(observed, self._far) > thresholds.unexplained:
            return Verdict.NOT_EXPLAINED, Reason.FAR
        replayed = measured.explained
        if replayed is not None and 1.0 - replayed.high > thresholds.unexplained:  # NaN where withheld: no gate
            return Verdict.NOT_EXPLAINED, Reason.REPLAYED
        return None, Reason.CHOSEN

    @property
    def _far(self) -> Mask:
        return far_modules(self.fits, len(self.measured.modules))

    def _is_in_the_layers(self) -> bool:
        """Whether layers disagree enough to set the policies apart: fewer than half, or one by much, locally."""
        observed, thresholds = self.mismatch, self.thresholds
        gate = observed.gate(thresholds)
        return (
            observed.is_symptom(thresholds)
            or observed.share_above(gate) >= thresholds.mismatch_share
            or observed.share_above(max(thresholds.mismatch_one, gate)) > 0
        )

    def nothing(self) -> WhatIfs:
        """Return what-ifs that name nothing."""
        named = np.zeros((len(self.measured.modules), len(FORWARD_ROLES)), dtype=np.bool_)
        return WhatIfs(Component.NONE, {}, (), named, (), None)

    def whatifs(self, reason: Reason) -> WhatIfs:
        """Return component, place and scores; nothing where rounding does not explain what the layers do.

        Its components and corrections would be beside the point there.
        """
        operands, observed, thresholds = self.measured.operands, self.mismatch, self.thresholds
        if operands is None or reason in (Reason.FAR, Reason.BEHIND, Reason.RULES, Reason.ELSEWHERE):
            return self.nothing()
        counted = self._counted_operands()
        if reason is Reason.CHOSEN:
            counted = self._that_differ(counted)
        errors = operand_errors(operands, self.weights)
        shares = errors.shares(counted)
        component = name_component(shares, thresholds)
        found = where(groups(errors, self.measured.modules, counted, thresholds), errors, component, thresholds)
        named = np.logical_or.reduce([members for _, members in found], initial=False) | np.zeros_like(counted)
        gate = observed.gate(thresholds)
        situation = Situation(
            operands=operands,
            mismatch=observed.per_module if reason is Reason.CHOSEN else np.full(len(counted), np.nan),
            gate=gate,
            share=None if observed.median > gate else _share_to_get_under(observed, thresholds),
            counted=counted,
        )
        scores = score_corrections(situation, self.weights, named, component, thresholds)
        return WhatIfs(component, shares, tuple(group for group, _ in found), named, tuple(scores), situation)

    def _that_differ(self, counted: Mask) -> Mask:
        """Leave out modules that provably compute the same function on both sides, which set nothing apart, and those
        that are far from what rounding does: no correction of it mends them."""
        differ = counted & ((self.mismatch.per_module != 0.0) & ~self._far)[:, None]
        return differ if differ.any() else counted

    def _counted_operands(self) -> Mask:
        """Return the operands [M, R] that the run quantizes, by the inferred recipes; all if it quantizes nothing."""
        counted = np.zeros((len(self.measured.modules), len(FORWARD_ROLES)), dtype=np.bool_)
        if not any(mask.any() for mask in self.quantized.values()):
            return ~counted
        for phase, mask in self.quantized.items():
            recipes = self.measured.outputs[phase].recipes
            for m in np.flatnonzero(mask):
                unknown = recipes[m] == ("none", "none")  # something is off, but no known recipe says which side
                counted[m] |= [unknown or side != "none" for side in recipes[m]]
        return counted


def _share_to_get_under(observed: Mismatch, thresholds: Thresholds) -> float:
    """Return the part of the Linears that may stay over the gate: none where fewer than `mismatch_share` are."""
    over = observed.share_above(observed.gate(thresholds))
    return thresholds.mismatch_share if over >= thresholds.mismatch_share else np.nextafter(0.0, 1.0)
