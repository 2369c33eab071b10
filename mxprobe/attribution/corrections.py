"""Score every correction on the named operands, and choose (science, section 8.6).

The gain is the part of the GEMM-output error that a correction removes, relative to what the run does now.
Recovery is the part of the *named component* that it mends, in the output:

    deadzone     1 - ||error left on the zeroed elements||^2 / ||error on them now||^2
    scale        removed / scale part               (scale is what an ideal scale would remove, so it counts first)
    saturation   removed / saturated part
    grid         (removed - scale part) / grid part
    mixed        the gain itself

Outputs of modules are added relative to their own ||output||^2, so that each counts by its relative error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mxprobe.schema import Component
from mxprobe_kernels.formats import CorrectionKind, Rule

from .costs import cost_of, tier_of
from .intervals import Gain, gain_of
from .measured import Array, OperandSums, divide
from .recommendation import CorrectionScore
from .thresholds import Thresholds

Mask = npt.NDArray[np.bool_]
KEEP = CorrectionKind.KEEP_HIGH_PRECISION.value
_NEVER = f"{CorrectionKind.RULE}:{Rule.FLOOR_DIV}"  # a bug's signature, not a remedy


@dataclass(frozen=True)
class Situation:
    """What corrections are measured against."""

    operands: OperandSums
    active: npt.NDArray[np.intp]
    """[M, R] index into `operands.corrections` of the correction that is on already; -1 for none."""
    mismatch: Array
    """[M] observed mismatch; all NaN where there is no symptom."""
    gate: float
    counted: Mask
    """[M, R] operands that are quantized in this run."""

    def current(self, name: str) -> Array:
        """[T, M, R] sums of an error as the run makes it now."""
        now = self.operands.base[name].copy()
        for m, r in np.argwhere(self.active >= 0):
            now[:, m, r] = self.operands.whatif[name][self.active[m, r], :, m, r]
        return now


def score_corrections(
    situation: Situation, weights: Array, named: Mask, component: Component, thresholds: Thresholds
) -> list[CorrectionScore]:
    """Scores of all corrections in the trace, and of keeping the operands in high precision, on `named` [M, R].

    `weights` [T] are resampling counts. Unsorted; `held_out_gain` is left to the caller.
    """
    if not named.any():
        return []
    operands = situation.operands
    reference = np.tensordot(weights, operands.base["out_ref2"], axes=(0, 0)) / weights.sum()
    now = {name: situation.current(name) for name in ("out_e2", "out_zeroed2", "sum_e2", "sum_e2_on_d")}
    parts = _parts(operands, weights, reference, named)
    scores: list[CorrectionScore] = []
    for index, correction in enumerate(operands.corrections):
        after = {name: values[index] for name, values in operands.whatif.items()}
        usable = named & (after["out_ref2"] > 0).any(axis=0)
        if not usable.any():
            continue
        measured = (after["out_ref2"] > 0) & usable
        before_t = _per_cluster(now["out_e2"] * measured, reference, usable)
        after_t = _per_cluster(after["out_e2"] * measured, reference, usable)
        gain = gain_of(after_t, before_t, weights)
        recovery = recovery_of(component, gain.value, float(weights @ before_t), parts)
        if component is Component.DEADZONE:
            left = float(weights @ _per_cluster(after["out_zeroed2"] * measured, reference, usable))
            there = float(weights @ _per_cluster(now["out_zeroed2"] * measured, reference, usable))
            recovery = 1.0 - left / there if there > 0 else float("nan")
        score = CorrectionScore(
            correction=correction,
            tier=tier_of(correction),
            gain=gain.value,
            gain_low=gain.low,
            gain_high=gain.high,
            n_steps=min(gain.n, int(operands.n_steps[usable].min())),
            held_out_gain=None,
            recovery=recovery,
            tensor_recovery=_tensor_recovery(after, operands, weights, usable, component),
            cost_gemm=cost_of(correction).cost_gemm,
            bits_per_element=cost_of(correction).bits_per_element,
            cures=_cures(situation, weights, usable, now["out_e2"], after["out_e2"]),
            is_active=bool((situation.active[usable] == index).all()),
            is_eligible=False,
            note=cost_of(correction).note,
        )
        scores.append(judged(score, thresholds))
    if KEEP not in operands.corrections:
        cures = _cures(situation, weights, named, now["out_e2"], np.zeros_like(now["out_e2"]))
        scores.append(judged(_keep(cures, int(operands.n_steps[named].min())), thresholds))
    return scores


def held_out(situation: Situation, weights: Array, named: Mask, correction: str) -> float:
    """Gain of a correction on the clusters that `weights` selects, for a choice made on others."""
    if correction == KEEP and KEEP not in situation.operands.corrections:
        return 1.0
    index = situation.operands.corrections.index(correction)
    reference = np.tensordot(weights, situation.operands.base["out_ref2"], axes=(0, 0)) / max(weights.sum(), 1.0)
    after = situation.operands.whatif["out_e2"][index]
    measured = situation.operands.whatif["out_ref2"][index] > 0
    now = situation.current("out_e2") * measured
    return gain_of(_per_cluster(after, reference, named), _per_cluster(now, reference, named), weights).value


def choose(scores: Sequence[CorrectionScore]) -> tuple[str, ...]:
    """The corrections to name: one, or several when undecided, the favourite first.

    Those that keep the format come first. Of them the cheapest that cures; if none cures, the largest gain, and
    with it every other whose interval overlaps at another cost. Then the second tier by the same rule. Where
    nothing passes, what is left is not to quantize these operands.
    """
    for tier in (1, 2):
        candidates = [score for score in scores if score.tier == tier and score.is_eligible]
        if not candidates:
            continue
        curing = [score for score in candidates if score.cures]
        if curing:
            return (min(curing, key=lambda score: (score.cost_gemm, -score.gain)).correction,)
        best = max(candidates, key=lambda score: score.gain)
        rivals = [s for s in candidates if s.cost_gemm != best.cost_gemm and s.gain_high >= best.gain_low]
        ordered = sorted([best, *rivals], key=lambda score: (-round(score.recovery, 2), score.cost_gemm))
        return tuple(score.correction for score in ordered)
    return (KEEP,)


def _per_cluster(values: Array, reference: Array, mask: Mask) -> Array:
    """[T] sum over masked operands of errors relative to their mean ||output||^2."""
    return divide(values, np.broadcast_to(reference, values.shape))[:, mask & (reference > 0)].sum(axis=1)


def _parts(operands: OperandSums, weights: Array, reference: Array, mask: Mask) -> dict[str, float]:
    def part(name: str) -> float:
        return float(weights @ _per_cluster(operands.base[name], reference, mask))

    ideal = part("out_dz2") + part("out_grid2") + 2.0 * part("out_dz_grid")
    return {
        "all": part("out_e2"),
        "scale": part("out_e2") - ideal,
        "grid": part("out_grid2") + part("out_dz_grid"),
        "saturated": part("out_saturated2"),
    }


def recovery_of(component: Component, gain: float, now: float, parts: Mapping[str, float]) -> float:
    """As defined above but for deadzone; capped at 1.

    `parts` (`all`, `scale`, `grid`, `saturated`) are of the plain quantizer and scaled to the error made `now`.
    """
    ratio = now / parts["all"] if parts["all"] > 0 else float("nan")
    removed, scale = gain * now, max(parts["scale"], 0.0) * ratio
    below = {
        Component.SCALE: scale,
        Component.SATURATION: parts["saturated"] * ratio,
        Component.GRID: parts["grid"] * ratio,
    }
    if component not in below:
        return gain
    mended = removed - scale if component is Component.GRID else removed
    return min(mended / below[component], 1.0) if below[component] > 0 else float("nan")


def _tensor_recovery(
    after: dict[str, Array], operands: OperandSums, weights: Array, mask: Mask, component: Component
) -> float | None:
    """Deadzone only: 1 - ||(Qc - x) on D||^2 / ||e_dz||^2, tensors weighted by their share of error on D."""
    if component is not Component.DEADZONE:
        return None
    own = np.tensordot(weights, operands.base["sum_e2"], axes=(0, 0))[mask]
    deadzone = np.tensordot(weights, operands.base["sum_dz2"], axes=(0, 0))[mask]
    left = np.tensordot(weights, after["sum_e2_on_d"], axes=(0, 0))[mask]
    there = float(np.nansum(divide(deadzone, own)))
    return 1.0 - float(np.nansum(divide(left, own))) / there if there > 0 else None


def _cures(situation: Situation, weights: Array, mask: Mask, now: Array, after: Array) -> bool | None:
    """Whether the median mismatch, scaled module by module with its output error, falls under the gate."""
    seen = np.isfinite(situation.mismatch)
    if not seen.any():
        return None
    reference = np.tensordot(weights, situation.operands.base["out_ref2"], axes=(0, 0))
    before = np.nan_to_num(divide(np.tensordot(weights, now, axes=(0, 0)), reference)) * situation.counted
    corrected = np.nan_to_num(divide(np.tensordot(weights, after, axes=(0, 0)), reference)) * situation.counted
    corrected = np.where(mask, corrected, before)
    left = divide(corrected.sum(axis=1), before.sum(axis=1))
    predicted = situation.mismatch * np.where(np.isfinite(left), left, 1.0)
    return bool(np.median(predicted[seen]) <= situation.gate)


def _keep(cures: bool | None, n_steps: int) -> CorrectionScore:
    cost = cost_of(KEEP)
    gain = Gain(1.0, 1.0, 1.0, n_steps)
    return CorrectionScore(
        correction=KEEP,
        tier=tier_of(KEEP),
        gain=gain.value,
        gain_low=gain.low,
        gain_high=gain.high,
        n_steps=n_steps,
        held_out_gain=None,
        recovery=1.0,
        tensor_recovery=1.0,
        cost_gemm=cost.cost_gemm,
        bits_per_element=cost.bits_per_element,
        cures=cures,
        is_active=False,
        is_eligible=False,
        note=f"no error by definition; {cost.note}",
    )


def judged(score: CorrectionScore, thresholds: Thresholds) -> CorrectionScore:
    """The score with `is_eligible` set."""
    eligible = (
        not score.is_active
        and score.correction != _NEVER
        and score.gain >= thresholds.min_gain
        and score.gain_low > thresholds.min_gain_low
        and score.recovery >= thresholds.min_recovery
    )
    return replace(score, is_eligible=eligible)
