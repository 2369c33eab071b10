"""Did the correction do what was predicted? A's what-if beside what B's layers did.

    predicted   1 - sum over modules, roles of error^2 with the correction / the same without, from A's what-ifs, for
                the operands on which B has switched it on
    measured    1 - level of B's realised output error / level of A's, same modules, aligned steps

Both are of the whole output error of the modules that A's verdict names. The runs are two trainings, so the two are
called equal when their intervals, widened by `TOLERANCE`, overlap.
"""

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.attribution.component import kind_of
from mxprobe.attribution.correction_scores import KEEP
from mxprobe.attribution.decision import Decision, decide
from mxprobe.attribution.intervals import Gain, gain_of
from mxprobe.attribution.measured import FORWARD_ROLES, Measured, correction_of, divide, measure
from mxprobe.attribution.ratios import realised_ratios
from mxprobe.attribution.symptom import Mismatch, mismatch
from mxprobe.attribution.thresholds import Thresholds
from mxprobe.attribution.words import correction_words, listed
from mxprobe.numbers import number
from mxprobe.schema import PLAIN_WORDS, Phase, Verdict
from mxprobe.trace import Trace

from .alignment import Alignment, Steps
from .levels import NEGLIGIBLE, ratio_of_levels

TOLERANCE = 0.05
"""Gains this close are called equal: what another seed moves, see docs/commands/compare.md."""


class Outcome(StrEnum):
    AS_PREDICTED = "helped as predicted"
    MORE = "helped more than predicted"
    LESS = "helped less than predicted"
    NOT_HELPED = "did not help"
    NOT_SWITCHED_ON = "not switched on"
    NOT_PREDICTED = "nothing was predicted"
    NOT_MEASURED = "cannot be told"


@dataclass(frozen=True)
class PredictionCheck:
    """A's verdict, what B switched on, and both gains. Gains are None where there is nothing to say."""

    outcome: Outcome
    text: str
    verdict: Verdict
    named: tuple[str, ...]
    """Corrections that A's verdict named."""
    correction: str
    """The one that is on in B and was not in A; "" for none."""
    kinds: tuple[str, ...]
    """Kinds of modules it is about."""
    n_on: int
    """Named operands on which B has it, of `n_operands`."""
    n_operands: int
    predicted_operands: Gain | None
    """Of the named operands' output error, as `recommend` prints it."""
    predicted: Gain | None
    measured: Gain | None


@dataclass(frozen=True)
class SymptomChange:
    """Median |realised error in rollout - in training| of both runs, each beside its gate."""

    a: float
    b: float
    gate_a: float
    gate_b: float

    @property
    def was_symptom(self) -> bool:
        return self.a > self.gate_a

    @property
    def is_symptom(self) -> bool:
        return self.b > self.gate_b


def check_prediction(
    a: Trace, b: Trace, alignment: Alignment, thresholds: Thresholds
) -> tuple[PredictionCheck, SymptomChange | None]:
    """Hold B against A's what-ifs, and A's symptom beside B's."""
    measured_a, measured_b = measure(a), measure(b)
    decision = decide(measured_a, np.ones(measured_a.n_clusters), thresholds)
    symptom = _symptom(decision.mismatch, mismatch(measured_b, np.ones(measured_b.n_clusters)), thresholds)
    return _check(a, b, alignment, decision, measured_a, measured_b), symptom


def _symptom(a: Mismatch, b: Mismatch, thresholds: Thresholds) -> SymptomChange | None:
    if not (a.n_modules and b.n_modules):
        return None
    return SymptomChange(a.median, b.median, a.gate(thresholds), b.gate(thresholds))


def _check(
    a: Trace, b: Trace, alignment: Alignment, decision: Decision, measured_a: Measured, measured_b: Measured
) -> PredictionCheck:
    named = decision.named.copy()
    common = set(alignment.modules)
    for m, name in enumerate(measured_a.modules):
        named[m] &= name in common
    modules = [measured_a.modules[m] for m in np.flatnonzero(named.any(axis=1))]
    phase = _phase(measured_a, measured_b, named)
    switched = _switched_on(measured_a, measured_b, phase)
    found = Counter(name for m, r in np.argwhere(named) if (name := switched.get((measured_a.modules[m], int(r)))))
    correction, n_on = found.most_common(1)[0] if found else ("", 0)
    facts = _Facts(decision, correction, tuple(dict.fromkeys(map(kind_of, modules))), n_on, int(named.sum()))
    if not modules or decision.situation is None:
        said = f"A's verdict is {PLAIN_WORDS[decision.verdict]}: there is no prediction to hold B against."
        return facts.to_check(Outcome.NOT_PREDICTED, said)
    if not correction:
        said = _not_switched_on(decision) + _not_exact_words(measured_b, phase, modules)
        return facts.to_check(Outcome.NOT_SWITCHED_ON, said)
    predicted = _predicted(decision, measured_a, modules, switched)
    if predicted is None:
        said = f"B has {correction_words(correction)} on, which A did not score: nothing was predicted of it."
        return facts.to_check(Outcome.NOT_PREDICTED, said)
    measured = _measured(a, b, alignment, modules, phase)
    outcome = _outcome(predicted, measured)
    return facts.to_check(outcome, _words(outcome, facts, predicted, measured), predicted, measured)


@dataclass(frozen=True)
class _Facts:
    decision: Decision
    correction: str
    kinds: tuple[str, ...]
    n_on: int
    n_operands: int

    def to_check(
        self, outcome: Outcome, text: str, predicted: Gain | None = None, measured: Gain | None = None
    ) -> PredictionCheck:
        score = next((each for each in self.decision.scores if each.correction == self.correction), None)
        own = None if score is None else Gain(score.gain, score.gain_low, score.gain_high, score.n_steps)
        verdict, chosen = self.decision.verdict, self.decision.chosen
        counts = (self.n_on, self.n_operands)
        return PredictionCheck(
            outcome, text, verdict, chosen, self.correction, self.kinds, *counts, own, predicted, measured
        )


def _phase(a: Measured, b: Measured, named: npt.NDArray[np.bool_]) -> Phase:
    """Return the phase in which the named modules make an error in A, and both runs were seen: the rollout first."""
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        if phase in a.outputs and phase in b.outputs:
            error = a.outputs[phase].realised(np.ones(a.n_clusters))[named.any(axis=1)]
            if bool((np.nan_to_num(error) >= NEGLIGIBLE).any()):
                return phase
    return Phase.ROLLOUT


def _switched_on(a: Measured, b: Measured, phase: Phase) -> dict[tuple[str, int], str]:
    """Return (module, role index) -> the correction that B's recipe has and A's has not.

    It is KEEP where B no longer quantizes.

    Only where one recipe reproduces B's outputs exactly: elsewhere the recipe is a best fit and says nothing. Going
    back to the plain quantizer is no correction.
    """
    found: dict[tuple[str, int], str] = {}
    before, after = a.outputs.get(phase), b.outputs.get(phase)
    if before is None or after is None:
        return found
    plain = f"rule:{a.operands.rule}" if a.operands else ""
    recipes_b = {
        module: recipe for module, recipe, exact in zip(b.modules, after.recipes, after.is_exact, strict=True) if exact
    }
    for module, recipe_a in zip(a.modules, before.recipes, strict=True):
        recipe_b = recipes_b.get(module, ("", ""))
        for r, (side_a, side_b) in enumerate(zip(recipe_a, recipe_b, strict=True)):
            if side_a in ("", "none") or side_b in ("", side_a):
                continue
            name = KEEP if side_b == "none" else correction_of(side_b)
            if name != plain:
                found[module, r] = name
    return found


def _not_exact_words(b: Measured, phase: Phase, modules: list[str]) -> str:
    sums = b.outputs.get(phase)
    exact = set() if sums is None else {m for m, is_exact in zip(b.modules, sums.is_exact, strict=True) if is_exact}
    n_unknown = sum(module not in exact for module in modules)
    if not n_unknown:
        return ""
    counted = f"{n_unknown} of {len(modules)} modules"
    return f" In {counted} no known recipe reproduces B's outputs: what is on there cannot be told."


def _predicted(
    decision: Decision, measured: Measured, modules: list[str], switched: dict[tuple[str, int], str]
) -> Gain | None:
    """Return A's what-ifs put together as B has switched them on; None where one of them was not scored."""
    situation, operands = decision.situation, measured.operands
    if situation is None or operands is None:
        return None
    now = operands.current["out_e2"]
    after = now.copy()
    for m, module in enumerate(measured.modules):
        for r in range(len(FORWARD_ROLES)):
            name = switched.get((module, r), "")
            if name == KEEP:
                after[:, m, r] = 0.0
            elif name in operands.corrections:
                after[:, m, r] = operands.whatif["out_e2"][operands.corrections.index(name), :, m, r]
            elif name and module in modules:
                return None
    counted = situation.counted & np.isin(measured.modules, modules)[:, None]
    reference = np.broadcast_to(operands.base["out_ref2"].mean(axis=0), now.shape)
    sums = [divide(values, reference)[:, counted] for values in (after, now)]
    return gain_of(np.nansum(sums[0], axis=1), np.nansum(sums[1], axis=1), np.ones(now.shape[0]))


def _measured(a: Trace, b: Trace, alignment: Alignment, modules: list[str], phase: Phase) -> Gain | None:
    """Return the gain in that phase; None with too few steps, or where A's error is negligible."""
    series = [_error_by_step(trace, steps, modules, phase) for trace, steps in ((a, alignment.a), (b, alignment.b))]
    n = min(values.size for values in series)
    if n < 2:
        return None
    level_a, level_b, ratio, low, high = ratio_of_levels(*series, paired=alignment.is_aligned)
    if level_a < NEGLIGIBLE:
        return None
    return Gain(1.0, 1.0, 1.0, n) if level_b < NEGLIGIBLE else Gain(1.0 - ratio, 1.0 - high, 1.0 - low, n)


def _error_by_step(trace: Trace, steps: Steps, modules: list[str], phase: Phase) -> pd.Series:
    """Return the mean over modules of the realised output error, by probed step."""
    rows = steps.rows(trace.outputs())
    rows = rows[rows["module"].isin(modules) & (rows["phase"] == phase.value)]
    return realised_ratios(rows, ["step", "module"]).groupby("step")["realised"].mean().dropna()


def _outcome(predicted: Gain, measured: Gain | None) -> Outcome:
    if measured is None or not all(map(math.isfinite, (predicted.value, measured.low, measured.high))):
        return Outcome.NOT_MEASURED
    if measured.low <= 0:
        return Outcome.NOT_HELPED
    if measured.high < predicted.low - TOLERANCE:
        return Outcome.LESS
    return Outcome.MORE if measured.low > predicted.high + TOLERANCE else Outcome.AS_PREDICTED


def _words(outcome: Outcome, facts: _Facts, predicted: Gain, measured: Gain | None) -> str:
    named = "which A's verdict named" if facts.correction in facts.decision.chosen else "which A's verdict did not name"
    name, where = correction_words(facts.correction), listed(facts.kinds)
    head = f"{name[0].upper()}{name[1:]}, {named}, is on in B for {facts.n_on} of {facts.n_operands} operands."
    foretold = f"A's what-ifs predicted {predicted.words} of the output error of {where} removed"
    if outcome is Outcome.NOT_MEASURED or measured is None:
        return f"{head} {foretold}; what B removed cannot be told: too few probed steps, or no error in A."
    return f"{head} It {outcome}: {foretold}, B measures {measured.words}."


def _not_switched_on(decision: Decision) -> str:
    if not decision.chosen:
        return (
            f"A's verdict is {PLAIN_WORDS[decision.verdict]} and names no correction; "
            "B switched none on in the operands with the largest error."
        )
    names = listed(map(correction_words, decision.chosen), last="or")
    score = next((each for each in decision.scores if each.correction == decision.chosen[0]), None)
    gain = "" if score is None else f", predicted to remove {number(score.gain)} of the output error,"
    return f"A's verdict named {names}{gain} but B has it on in none of these operands: the prediction is not tested."
