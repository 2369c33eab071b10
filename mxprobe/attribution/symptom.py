"""Is anything quantized, do training and rollout disagree, and does rounding explain what the layers do?

Without log-probabilities the mismatch is read off the layers (science, section 8.3a): the median over Linears of

    |realised error in rollout - realised error in training|,

against the change of realised error between neighbouring probed steps of training (its floor: the measure moves
that much when nothing but the batch does). A Linear whose outputs are reproduced exactly by one and the same
recipe on both sides computes the same function on both sides, whatever its error: its mismatch is 0 by proof.

Of an even number of Linears the median is the upper one: a fault in half of the model is a fault of the model.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mxprobe.schema import Phase

from .measured import Array, Measured, OutputSums, divide
from .thresholds import Thresholds

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Mismatch:
    """Train/rollout mismatch. Errors are energies relative to the exact product."""

    per_module: Array
    """[M]; NaN where a module was not seen in both phases."""
    median: float
    floor: float
    n_modules: int
    n_same_recipe: int
    """Modules with one exact recipe on both sides."""

    def gate(self, thresholds: Thresholds) -> float:
        """Return what the median must exceed to be a symptom."""
        return max(thresholds.mismatch, thresholds.mismatch_floor_factor * self.floor)

    def is_symptom(self, thresholds: Thresholds) -> bool:
        """Whether the median Linear is over the gate, or at least `far_share` of them, or one by much."""
        gate = self.gate(thresholds)
        by_much = self.share_above(max(gate, thresholds.mismatch_alone)) > 0
        return self.n_modules > 0 and (self.median > gate or self.share_above(gate) >= thresholds.far_share or by_much)

    def share_above(self, gate: float) -> float:
        """Return the part of the Linears seen on both sides whose own mismatch exceeds `gate`."""
        seen = self.per_module[np.isfinite(self.per_module)]
        return float((seen > gate).mean()) if seen.size else 0.0

    @property
    def largest(self) -> float:
        """Return the mismatch of the Linear with most; NaN where none was seen on both sides."""
        seen = self.per_module[np.isfinite(self.per_module)]
        return float(seen.max()) if seen.size else float("nan")

    def reached_by(self, share: float) -> float:
        """Return the largest mismatch that at least `share` of the Linears reach.

        Over a gate where so many are over it.
        """
        seen = np.sort(self.per_module[np.isfinite(self.per_module)])
        return float(seen[-max(math.ceil(share * seen.size), 1)]) if seen.size else float("nan")


@dataclass(frozen=True)
class RuleMismatch:
    """Linears that both sides quantize, each by a known recipe, and not by the same one."""

    n_modules: int
    n_both: int
    """Linears of which both sides are known and quantize the same operand."""
    train: str
    rollout: str
    """The most frequent pair of recipes, as `mxfp4+rceil`."""

    @property
    def share(self) -> float:
        return self.n_modules / self.n_both if self.n_both else 0.0


@dataclass(frozen=True)
class Fit:
    """Realised against predicted output error of the quantized modules of one phase.

    A module is far where its error has another size than its recipe predicts, or where the recipe's own rounding leaves
    most of it unexplained: truncated codes, noise and old weights can be as large as some recipe's error by chance.
    """

    phase: Phase
    n_quantized: int
    n_far: int
    n_unexplained: int
    """Of those far, the ones of another error than their recipe's."""
    far: Mask
    """[M]"""
    n_exact: int
    median_log2: float
    """Median log2(realised / predicted); inf where the recipe predicts no error at all."""

    @property
    def far_share(self) -> float:
        return self.n_far / self.n_quantized if self.n_quantized else 0.0


def quantized_modules(measured: Measured, weights: Array, thresholds: Thresholds) -> dict[Phase, Mask]:
    """Return per phase which modules [M] differ from the exact product by more than high precision explains."""
    return {
        phase: np.nan_to_num(sums.realised(weights)) > thresholds.quantized_error
        for phase, sums in measured.outputs.items()
    }


def mismatch(measured: Measured, weights: Array) -> Mismatch:
    """Compare the two phases module by module; empty (n_modules = 0) when one phase was not seen."""
    train, rollout = measured.outputs.get(Phase.TRAIN), measured.outputs.get(Phase.ROLLOUT)
    if train is None or rollout is None:
        nothing = np.full(len(measured.modules), np.nan)
        return Mismatch(nothing, float("nan"), float("nan"), 0, 0)
    difference = np.abs(rollout.realised(weights) - train.realised(weights))
    same = (
        train.is_exact
        & rollout.is_exact
        & np.array([a == b for a, b in zip(train.recipes, rollout.recipes, strict=True)], dtype=np.bool_)
    )
    per_module = np.where(same & np.isfinite(difference), 0.0, difference)
    seen = np.isfinite(per_module)
    if not seen.any():
        return Mismatch(per_module, float("nan"), float("nan"), 0, 0)
    return Mismatch(
        per_module=per_module,
        median=upper_median(per_module[seen]),
        floor=_floor(train, weights, seen),
        n_modules=int(seen.sum()),
        n_same_recipe=int((same & seen).sum()),
    )


def upper_median(values: Array) -> float:
    return float(np.quantile(values, 0.5, method="higher"))


MAX_UNEXPLAINED = 0.25
"""Of its error energy: a module's recipe is known where it leaves less. Kernels that break ties in another way leave
some 5 to 15 % with bfloat16 tensors, and are the rule's all the same; old weights leave about all."""


def rule_mismatch(measured: Measured) -> RuleMismatch:
    """Return whether both sides round, and differently, as the recipes say, whatever the size of the errors."""
    train, rollout = measured.outputs.get(Phase.TRAIN), measured.outputs.get(Phase.ROLLOUT)
    if train is None or rollout is None:
        return RuleMismatch(0, 0, "", "")
    n_both, differing = 0, Counter[tuple[str, str]]()
    known = [
        sums.is_exact | (np.nan_to_num(sums.unexplained(), nan=1.0) < MAX_UNEXPLAINED) for sums in (train, rollout)
    ]
    for m in np.flatnonzero(known[0] & known[1]):
        sides = zip(train.recipes[m], rollout.recipes[m], strict=True)
        both = [(a, b) for a, b in sides if "none" not in (a, b)]
        n_both += bool(both)
        unlike = [pair for pair in both if pair[0] != pair[1]]
        if unlike:
            differing[unlike[0]] += 1
    pair = differing.most_common(1)[0][0] if differing else ("", "")
    return RuleMismatch(sum(differing.values()), n_both, *pair)


def fit(measured: Measured, weights: Array, thresholds: Thresholds) -> list[Fit]:
    """Return one `Fit` per phase in which something is quantized."""
    found: list[Fit] = []
    for phase, quantized in quantized_modules(measured, weights, thresholds).items():
        if not quantized.any():
            continue
        sums = measured.outputs[phase]
        with np.errstate(divide="ignore"):
            ratio = np.log2(sums.realised(weights)[quantized]) - np.log2(sums.predicted(weights)[quantized])
        unexplained = np.nan_to_num(sums.unexplained(weights)[quantized]) > thresholds.unexplained
        far = np.zeros_like(quantized)
        far[quantized] = unexplained | (np.abs(ratio) > thresholds.far_log2)
        found.append(
            Fit(
                phase=phase,
                n_quantized=int(quantized.sum()),
                n_far=int(far.sum()),
                n_unexplained=int(unexplained.sum()),
                n_exact=int(sums.is_exact[quantized].sum()),
                median_log2=float(np.median(ratio)),
                far=far,
            )
        )
    return found


def far_modules(fits: Sequence[Fit], n_modules: int) -> Mask:
    """Return which modules [M] are far in any phase."""
    return np.logical_or.reduce([each.far for each in fits], initial=False) | np.zeros(n_modules, dtype=np.bool_)


def share_of_far(observed: Mismatch, far: Mask) -> float:
    """Return the part of the Linears' summed mismatch that the far ones make."""
    total = float(np.nansum(observed.per_module))
    return float(np.nansum(observed.per_module[far])) / total if total > 0 else 0.0


def _floor(train: OutputSums, weights: Array, seen: Mask) -> float:
    """Return the median over modules of the median change of error between neighbouring probed training steps."""
    error = divide(train.realised2, train.ref2)[weights > 0][:, seen]
    changes = np.abs(np.diff(error, axis=0))
    changes = changes[:, np.isfinite(changes).any(axis=0)]
    return float(np.median(np.nanmedian(changes, axis=0))) if changes.size else 0.0
