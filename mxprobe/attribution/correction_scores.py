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
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from .costs import cost_of, tier_of
from .intervals import Gain, gain_of
from .measured import Array, Cut, OperandSums, divide
from .ratios import output_parts
from .recommendation import CorrectionScore
from .symptom import upper_median
from .thresholds import Thresholds

Mask = npt.NDArray[np.bool_]
KEEP = CorrectionKind.KEEP_HIGH_PRECISION.value


@dataclass(frozen=True)
class Situation:
    """What corrections are measured against."""

    operands: OperandSums
    mismatch: Array
    """[M] observed mismatch; all NaN where there is no symptom."""
    gate: float
    share: float | None
    """Part of the modules over the gate that makes the symptom; None where their median is it."""
    counted: Mask
    """[M, R] operands that are quantized in this run."""


def score_corrections(
    situation: Situation, weights: Array, named: Mask, component: Component, thresholds: Thresholds
) -> list[CorrectionScore]:
    """Return scores of all corrections in the trace, and of high precision, on the operands `named` [M, R].

    `weights` [T] are resampling counts. Unsorted; `held_out_gain` is left to the caller.
    """
    errors = _Errors(situation.operands, weights, named)
    if not errors.n_operands:
        return []
    operands = situation.operands
    parts = errors.parts()
    before, after = errors.before("out_e2"), errors.after("out_e2")
    zeroed_before, zeroed_after = errors.before("out_zeroed2"), errors.after("out_zeroed2")
    left, tensor_recovery = errors.left_per_operand(), errors.tensor_recovery()
    cures = _Cures(situation, weights, errors.chosen, thresholds)
    n_steps = int(operands.n_steps[errors.chosen].min())
    scores: list[CorrectionScore] = []
    for index, correction in enumerate(operands.corrections):
        if not errors.measured[index].any():
            continue
        gain = gain_of(after[index], before[index], weights)
        recovery = recovery_of(component, gain.value, float(weights @ before[index]), parts)
        if component is Component.DEADZONE:
            there = float(weights @ zeroed_before[index])
            recovery = 1.0 - float(weights @ zeroed_after[index]) / there if there > 0 else float("nan")
        scores.append(
            scored(
                correction,
                replace(gain, n=min(gain.n, n_steps)),
                recovery,
                thresholds,
                tensor_recovery=float(tensor_recovery[index]) if component is Component.DEADZONE else None,
                cures=cures.by(left[index]),
                is_active=bool((operands.active[errors.chosen] == index).all()),
            )
        )
    if KEEP not in operands.corrections:
        none_left = cures.by(np.zeros(errors.n_operands))
        score = scored(KEEP, Gain(1.0, 1.0, 1.0, n_steps), 1.0, thresholds, tensor_recovery=1.0, cures=none_left)
        scores.append(replace(score, note=f"no error by definition; {score.note}"))
    return scores


def held_out(situation: Situation, weights: Array, named: Mask, correction: str) -> float:
    """Return the gain of a correction on the clusters that `weights` selects, for operands chosen on others."""
    corrections = situation.operands.corrections
    if correction not in corrections:
        return 1.0  # high precision
    index = corrections.index(correction)
    errors = _Errors(situation.operands, weights, named)
    return gain_of(errors.after("out_e2")[index], errors.before("out_e2")[index], weights).value


def choose(scores: Sequence[CorrectionScore]) -> tuple[str, ...]:
    """Return the corrections to name: one, or several when undecided, the favourite first.

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


class _Errors:
    """Errors of the named operands, each relative to its own mean ||output||^2, so that they can be added.

    A correction is compared with what the run does now on the clusters in which both were measured.
    """

    def __init__(self, operands: OperandSums, weights: Array, named: Mask) -> None:
        reference = np.tensordot(weights, operands.base["out_ref2"], axes=(0, 0)) / max(float(weights.sum()), 1.0)
        self.chosen: Mask = named & (reference > 0)
        self.n_operands = int(self.chosen.sum())
        self._cut: Cut = operands.cut(self.chosen)
        self.measured: npt.NDArray[np.bool_] = self._cut.measured
        """[C, T, N]"""
        self._weights = weights
        self._per_output: Array = 1.0 / reference[self.chosen]

    def before(self, name: str) -> Array:
        """Return [C, T] as the run does now, where that correction was measured."""
        return self._cut.before[name] @ self._per_output

    def after(self, name: str) -> Array:
        """Return [C, T] with each correction."""
        return self._cut.after[name] @ self._per_output

    def left_per_operand(self) -> Array:
        """Return [C, N] part of each operand's output error that a correction leaves; NaN where it was not measured."""
        after, before = self._cut.after["out_e2"], self._cut.before["out_e2"]
        return divide(np.einsum("t,ctn->cn", self._weights, after), np.einsum("t,ctn->cn", self._weights, before))

    def parts(self) -> dict[str, float]:
        """Return parts of the plain quantizer's output error, for `recovery_of`."""
        sums = {name: self._base(name) for name in self._cut.base if name.startswith("out_")}
        return {"all": sums["out_e2"], **output_parts(sums)}

    def tensor_recovery(self) -> Array:
        """Return [C] 1 - ||(Qc - x) on D||^2 / ||e_dz||^2, tensors weighted by the share of their error on D."""
        own = self._weights @ self._cut.base["sum_e2"]
        deadzone = self._weights @ self._cut.base["sum_dz2"]
        left = np.einsum("t,ctn->cn", self._weights, self._cut.after["sum_e2_on_d"])
        there = np.full(len(left), np.nansum(divide(deadzone, own)))
        return 1.0 - divide(np.nansum(divide(left, np.broadcast_to(own, left.shape)), axis=-1), there)

    def _base(self, name: str) -> float:
        return float((self._weights @ self._cut.base[name] * self._per_output).sum())


def recovery_of(component: Component, gain: float, now: float, parts: Mapping[str, float]) -> float:
    """Return the recovery as defined above, but for deadzone; capped at 1.

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


class _Cures:
    """Whether a correction leaves no symptom of the mismatch, scaled module by module with its output error."""

    def __init__(self, situation: Situation, weights: Array, chosen: Mask, thresholds: Thresholds) -> None:
        self._situation, self._chosen, self._thresholds = situation, chosen, thresholds
        self._seen = np.isfinite(situation.mismatch)
        operands = situation.operands
        now = np.tensordot(weights, operands.current["out_e2"], axes=(0, 0))
        now = np.nan_to_num(divide(now, np.tensordot(weights, operands.base["out_ref2"], axes=(0, 0))))
        self._now: Array = now * situation.counted

    def by(self, left: Array) -> bool | None:
        """Return whether it cures.

        `left` [N]: part of the error that remains on the chosen operands, whole where unknown.
        """
        if not self._seen.any():
            return None
        corrected = self._now.copy()
        corrected[self._chosen] *= np.where(np.isfinite(left), left, 1.0)
        part = divide(corrected.sum(axis=1), self._now.sum(axis=1))
        predicted = self._situation.mismatch * np.where(np.isfinite(part), part, 1.0)
        return is_cured(predicted[self._seen], self._situation.gate, self._situation.share, self._thresholds)


def is_cured(left: Array, gate: float, share: float | None, thresholds: Thresholds) -> bool:
    """Whether mismatches `left` of all Linears pass every gate of a symptom, and `share`, see `Situation`."""
    allowed = thresholds.far_share if share is None else min(share, thresholds.far_share)
    by_much = left > max(gate, thresholds.mismatch_alone)
    return bool(upper_median(left) <= gate and (left > gate).mean() < allowed and not by_much.any())


def scored(
    correction: str,
    gain: Gain,
    recovery: float,
    thresholds: Thresholds,
    *,
    tensor_recovery: float | None,
    cures: bool | None,
    is_active: bool = False,
) -> CorrectionScore:
    """Return the score of a correction with its cost, and whether it passes every threshold.

    `floor_div` never does: it is a bug's signature, not a remedy. Nor does `channels:K`, which ranks channels by the
    error that it is then scored on, and which no engine has.
    """
    cost, parsed = cost_of(correction, thresholds.device), Correction.parse(correction)
    return CorrectionScore(
        correction=correction,
        tier=tier_of(correction),
        gain=gain.value,
        gain_low=gain.low,
        gain_high=gain.high,
        n_steps=gain.n,
        held_out_gain=None,
        recovery=recovery,
        tensor_recovery=tensor_recovery,
        cost_gemm=cost.cost_gemm,
        bits_per_element=cost.bits_per_element,
        cures=cures,
        is_active=is_active,
        is_eligible=(
            not is_active
            and parsed.parameter is not Rule.FLOOR_DIV
            and parsed.kind is not CorrectionKind.CHANNEL_RESIDUAL
            and gain.value >= thresholds.min_gain
            and gain.low > thresholds.min_gain_low
            and recovery >= thresholds.min_recovery
        ),
        note=cost.note,
    )
