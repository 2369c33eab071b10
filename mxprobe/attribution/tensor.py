"""One tensor on its own, with no run and no symptom: component and correction from its own error.

The gate is the normalised error (NMSE below 2e-3 is clean), a correction cures when it brings the tensor under
that gate, and there is no interval: the tensor is measured whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxprobe.schema import Component

from . import ratios
from .component import name_component
from .correction_scores import KEEP, choose, recovery_of, scored
from .intervals import Gain
from .recommendation import CorrectionScore
from .thresholds import Thresholds


@dataclass(frozen=True)
class TensorJudgement:
    """What is wrong with a tensor and what mends it; no correction is chosen for a clean one."""

    component: Component
    nmse: float
    shares: dict[str, float]
    scores: tuple[CorrectionScore, ...]
    chosen: tuple[str, ...]


def judge_tensor(
    sums: Mapping[str, Any], after: Mapping[str, Mapping[str, Any]], thresholds: Thresholds | None = None
) -> TensorJudgement:
    """Judge the sums of one tensor.

    Args:
        sums: values of a `tensors` row (`ENERGY_SUMS` and `COUNTS`).
        after: per correction the values `sum_e2` and `sum_e2_on_d` of a `whatif` row.
        thresholds: gates to use in place of the defaults.
    """
    thresholds = thresholds or Thresholds()
    values = ratios.tensor_ratios(sums).iloc[0]
    nmse = float(values["nmse"])
    shares = {name: float(values[name]) for name in ratios.SHARES}
    if not nmse >= thresholds.clean_nmse:
        return TensorJudgement(Component.NONE, nmse, shares, (), ())
    component = name_component(shares, thresholds)
    scores = [_score(name, sums, row, nmse, component, thresholds) for name, row in after.items()]
    if KEEP not in after:
        scores.append(_score(KEEP, sums, {"sum_e2": 0.0, "sum_e2_on_d": 0.0}, nmse, component, thresholds))
    return TensorJudgement(component, nmse, shares, tuple(scores), choose(scores))


def _score(
    correction: str,
    sums: Mapping[str, Any],
    after: Mapping[str, Any],
    nmse: float,
    component: Component,
    thresholds: Thresholds,
) -> CorrectionScore:
    now = float(sums["sum_e2"])
    left = float(after["sum_e2"]) / now
    if component is Component.DEADZONE:
        deadzone = float(sums["sum_dz2"])
        recovery = 1.0 - float(after["sum_e2_on_d"]) / deadzone if deadzone > 0 else float("nan")
    else:
        ideal = float(sums["sum_dz2"]) + float(sums["sum_grid2"])
        parts = {"all": now, "scale": now - ideal, "grid": float(sums["sum_grid2"])}
        parts["saturated"] = float(sums["sum_e2_saturated"])
        recovery = recovery_of(component, 1.0 - left, now, parts)
    return scored(
        correction,
        Gain(1.0 - left, 1.0 - left, 1.0 - left, 1),
        recovery,
        thresholds,
        tensor_recovery=recovery if component is Component.DEADZONE else None,
        cures=nmse * left < thresholds.clean_nmse,
    )
