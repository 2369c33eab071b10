"""What replayed microbatches say: KL and weight gradients under each arm, their split, their controls.

    KL(arm) = sum of KL(high || arm) / n_tokens        gain = 1 - KL(arm) / KL(q)
    gradient error(arm) = mean over modules of ||dW_arm - dW_high||^2 / ||dW_high||^2
    split   scale = (M(q) - M(qstar)) / M(q)   deadzone = (M(qstar) - M(qstar_dz)) / M(q)   grid = M(qstar_dz) / M(q)
    structure ratio = M(q) / M(control)        1: only the size of the error matters, not what it looks like

M is either measure. The mean over modules, because a sum is ruled by the module with the largest gradient. Intervals
are of t over microbatches (steps and ranks), paired: arms share tokens and random states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from .gradient_ratios import error_ratios
from .intervals import ratio_and_half

PLAIN, CONTROLS = "q", ("noise", "flip")
REFERENCES = ("high", "floor")
"""Arms that round nothing: high precision, and high precision in another composition of the batch."""
SEQUENCE = (PLAIN, "qstar", "qstar_dz")
PARTS = ("scale", "deadzone", "grid")
_MICROBATCH = ("step", "micro_step", "rank")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over microbatches with its t interval; the interval is infinite with fewer than two."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class ArmEffect:
    """What an arm does to the policy, in nats per token."""

    kl: Estimate
    """KL(high || arm)."""
    gain: Estimate | None
    """Part of the plain quantizer's KL that the arm removes; None for `q`, for arms that round nothing, without `q`."""
    log_prob_shift: float
    entropy_shift: float


def arm_effects(replays: pd.DataFrame) -> dict[str, ArmEffect]:
    """Return the effect of each arm of a `replays` frame."""
    kl, tokens = _wide(replays, "sum_kl"), _wide(replays, "n_tokens")
    found: dict[str, ArmEffect] = {}
    for arm in kl.columns:
        rows = replays[replays["arm"] == arm]
        n_tokens = float(rows["n_tokens"].sum())
        own, gain = ratio_of(kl[arm].to_numpy(float), tokens[arm].to_numpy(float)), None
        if PLAIN in kl and arm not in (PLAIN, *REFERENCES):
            left = ratio_of(kl[arm].to_numpy(float), kl[PLAIN].to_numpy(float))
            gain = Estimate(1.0 - left.value, 1.0 - left.high, 1.0 - left.low, own.n)
        shifts = (_per(rows[f"sum_{name}_shift"], n_tokens) for name in ("log_prob", "entropy"))
        found[str(arm)] = ArmEffect(own, gain if gain is not None and np.isfinite(gain.value) else None, *shifts)
    return found


def kl_split(replays: pd.DataFrame) -> dict[str, Estimate]:
    """Return the shares of the KL by component, which sum to 1; empty where an arm of the sequence is missing."""
    return _split(_wide(replays, "sum_kl"))


def kl_structure(replays: pd.DataFrame) -> dict[str, Estimate]:
    """Return KL(q) relative to that of each control that was replayed."""
    return _structure(_wide(replays, "sum_kl"))


def gradient_effects(replay_gradients: pd.DataFrame, by: Sequence[str] = ("arm", "module")) -> pd.DataFrame:
    """Return `relative_l2`, `cosine`, `log2_norm_ratio`, `projection_gain` of the weight gradient per group.

    Sums are added over microbatches first, divided last.
    """
    grouped = replay_gradients.groupby(list(by), observed=True, sort=True)
    return error_ratios(grouped[["ref2", "err2", "ref_err"]].sum()).reset_index()


def gradient_errors(replay_gradients: pd.DataFrame) -> dict[str, Estimate]:
    """Return per arm the mean over modules and microbatches of ||D||^2 / ||dW||^2, with its interval."""
    wide = _wide_gradients(replay_gradients)
    return {str(arm): ratio_of(wide[arm].to_numpy(float), np.ones(len(wide))) for arm in wide.columns}


def gradient_split(replay_gradients: pd.DataFrame) -> dict[str, Estimate]:
    """Return the shares of the squared relative gradient error by component, which sum to 1."""
    return _split(_wide_gradients(replay_gradients))


def gradient_structure(replay_gradients: pd.DataFrame) -> dict[str, Estimate]:
    """Return the gradient error of `q` relative to each control's."""
    return _structure(_wide_gradients(replay_gradients))


def gradient_sensitivity(gradient_probes: pd.DataFrame, *, component: str = "total") -> pd.DataFrame:
    """Return what each operand's error does to the weight gradients of the whole model, the largest first.

    Columns: `module` (or a group of them), `role`, `method`, `relative_l2` = ||change of all dW|| / ||all dW||,
    `n_probes`, `n_microbatches`. Effects of operands interact: they do not add up to that of all together.
    """
    rows = gradient_probes[gradient_probes["component"] == component]
    grouped = rows.groupby(["module", "role", "method"], observed=True)
    sums = grouped[["ref2", "err2", "n_probes"]].sum().assign(n_microbatches=grouped.size())
    sums["relative_l2"] = np.sqrt(sums["err2"] / sums["ref2"].where(sums["ref2"] > 0))
    found = sums.drop(columns=["ref2", "err2"]).sort_values("relative_l2", ascending=False).reset_index()
    return found[["module", "role", "method", "relative_l2", "n_probes", "n_microbatches"]]


def ratio_of(above: Array, below: Array, *, level: float = 0.95) -> Estimate:
    """Return sum(above) / sum(below) over microbatches with its t interval; NaN rows are left out."""
    used = np.isfinite(above) & np.isfinite(below)
    value, half, n = ratio_and_half(above[used], below[used], np.ones(int(used.sum())), level)
    return Estimate(value, value - half, value + half, n)


def _split(wide: pd.DataFrame) -> dict[str, Estimate]:
    if not set(SEQUENCE) <= set(wide.columns):
        return {}
    q, qstar, qstar_dz = (wide[arm].to_numpy(float) for arm in SEQUENCE)
    parts = (q - qstar, qstar - qstar_dz, qstar_dz)
    return {name: ratio_of(part, q) for name, part in zip(PARTS, parts, strict=True)}


def _structure(wide: pd.DataFrame) -> dict[str, Estimate]:
    found = [control for control in CONTROLS if control in wide.columns and PLAIN in wide.columns]
    return {each: ratio_of(wide[PLAIN].to_numpy(float), wide[each].to_numpy(float)) for each in found}


def _wide(replays: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the sums, [microbatch, arm]."""
    keys = [name for name in _MICROBATCH if name in replays]
    return replays.groupby([*keys, "arm"], observed=True)[value].sum().unstack("arm")


def _wide_gradients(replay_gradients: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over modules of the squared relative error, [microbatch, arm]."""
    keys = [name for name in _MICROBATCH if name in replay_gradients]
    known = replay_gradients[replay_gradients["ref2"] > 0]
    relative = known.assign(relative2=known["err2"] / known["ref2"])
    return relative.groupby([*keys, "arm"], observed=True)["relative2"].mean().unstack("arm")


def _per(values: pd.Series, n_tokens: float) -> float:
    return float(values.sum(min_count=1)) / n_tokens if n_tokens else float("nan")
