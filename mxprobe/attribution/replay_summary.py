"""Everything a trace's replays answer after the fact, as plain data: `mxprobe replay`, its JSON, and the page.

predicted gain(c) = 1 - sum_i Delta2_i r_ic / sum_i Delta2_i        r_ic: part of operand i's GEMM-output error that c
                                                                    leaves, as the what-ifs measured it
"""

from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from mxprobe.plain_data import plain_data
from mxprobe.schema import Role
from mxprobe.trace import Trace

from . import replay_effects
from .ratios import left_by_corrections
from .replay_effects import PLAIN, Estimate
from .sensitivity_ranks import operand_sensitivity, validity

JSON_SCHEMA = "mxprobe.replay/1"
_FORWARD = (Role.X_FWD.value, Role.W_FWD.value)
_EVENT = "sensitivity"


@dataclass(frozen=True)
class ArmSummary:
    arm: str
    kl: Estimate
    """KL(high || arm) in nats per token."""
    gain: Estimate | None
    """Part of the plain quantizer's KL that the arm removes, replayed."""
    predicted_gain: float | None
    """The same to first order from Delta2 and the what-ifs; None where the trace lacks either."""
    entropy_shift: float
    log_prob_shift: float
    gradient_error: Estimate | None
    """Mean over modules of ||dW_arm - dW_high||^2 / ||dW_high||^2."""


@dataclass(frozen=True)
class ModuleGradient:
    """The weight gradient of one module under the plain quantizer, against high precision."""

    module: str
    relative_l2: float
    cosine: float
    log2_norm_ratio: float
    projection_gain: float


@dataclass(frozen=True)
class OperandEffect:
    """What one operand's error does to all weight gradients together."""

    module: str
    role: str
    method: str
    relative_l2: float


@dataclass(frozen=True)
class ReplaySummary:
    steps: tuple[int, ...]
    """Replayed steps."""
    n_microbatches: int
    n_tokens: float
    """Counted tokens of one arm, over all microbatches."""
    estimator: str
    """`exact` from logits, or `k3`."""
    n_modules: int
    arms: tuple[ArmSummary, ...]
    kl_split: dict[str, Estimate]
    kl_structure: dict[str, Estimate]
    gradient_split: dict[str, Estimate]
    gradient_structure: dict[str, Estimate]
    predicted_kl: float | None
    """Sum over operands of Delta2 / 2 in the replayed steps, to be held against the KL of `q`; None without them."""
    is_valid: bool | None
    """Whether the prediction holds in most replayed steps: within a factor of two, and under a tenth of a nat."""
    gradients: tuple[ModuleGradient, ...]
    """By module, the largest relative error first."""
    operands: tuple[OperandEffect, ...]
    """By operand, the largest first."""
    notes: tuple[str, ...]
    """What the agent said of its replays: what one cost, what could not be had."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data; numbers that are not finite are null."""
        return {"schema": JSON_SCHEMA, **plain_data(self)}


def replay_summary(trace: Trace) -> ReplaySummary | None:
    """What the trace's replays say; None where it holds none."""
    forward = trace.table("replays")
    if forward.empty:
        return None
    backward, sensitivity = trace.table("replay_gradients"), trace.sensitivity()
    events = trace.events()
    checked = validity(sensitivity, forward)
    microbatch = [name for name in ("step", "micro_step", "rank") if name in forward]
    plain = forward[forward["arm"] == PLAIN]
    one_arm = plain if len(plain) else forward[forward["arm"] == forward["arm"].iloc[0]]
    return ReplaySummary(
        steps=tuple(sorted(int(step) for step in forward["step"].unique())),
        n_microbatches=len(forward[microbatch].drop_duplicates()),
        n_tokens=float(one_arm["n_tokens"].sum()),
        estimator=str(forward["estimator"].iloc[0]),
        n_modules=int(forward["n_modules"].max()),
        arms=tuple(_arms(forward, backward, predicted_gains(trace))),
        kl_split=replay_effects.kl_split(forward),
        kl_structure=replay_effects.kl_structure(forward),
        gradient_split=replay_effects.gradient_split(backward),
        gradient_structure=replay_effects.gradient_structure(backward),
        predicted_kl=float(checked["predicted_kl"].mean()) if len(checked) else None,
        is_valid=bool(checked["is_valid"].mean() > 0.5) if len(checked) else None,
        gradients=tuple(_gradients(backward)),
        operands=tuple(_operands(trace.table("gradient_probes"))),
        notes=tuple(events.loc[events["kind"].astype(str) == _EVENT, "detail"].astype(str).unique().tolist()),
    )


def predicted_gains(trace: Trace) -> dict[str, float]:
    """Correction -> predicted part of the KL that it removes; empty where the trace lacks sensitivities or what-ifs."""
    operands = operand_sensitivity(trace.sensitivity())
    operands = operands[operands["role"].isin(_FORWARD)]
    tensors = trace.table("tensors", ("module", "role", "out_e2"))
    whatif = trace.table("whatif", ("module", "role", "correction", "out_e2"))
    if operands.empty or tensors.empty or whatif.empty:
        return {}
    key = ["module", "role"]
    delta2 = operands.astype(dict.fromkeys(key, str)).set_index(key)["delta2"]
    left = left_by_corrections(tensors, whatif).reindex(delta2.index)
    known = left.notna().any(axis=1).to_numpy()
    total = float(delta2[known].sum())
    if total <= 0:
        return {}
    return {str(name): 1.0 - float((delta2[known] * left.loc[known, name]).sum()) / total for name in left.columns}


def _arms(forward: pd.DataFrame, backward: pd.DataFrame, predicted: dict[str, float]) -> list[ArmSummary]:
    errors = replay_effects.gradient_errors(backward)
    found = [
        ArmSummary(arm, gradient_error=errors.get(arm), predicted_gain=predicted.get(arm), **vars(effect))
        for arm, effect in replay_effects.arm_effects(forward).items()
    ]
    return sorted(found, key=lambda each: (each.arm != PLAIN, each.kl.value))


def _gradients(backward: pd.DataFrame) -> list[ModuleGradient]:
    effects = replay_effects.gradient_effects(backward[backward["arm"] == PLAIN], ("module",))
    names = [field.name for field in fields(ModuleGradient)][1:]
    rows = effects.sort_values("relative_l2", ascending=False).to_dict("records")
    return [ModuleGradient(str(row["module"]), *(float(row[name]) for name in names)) for row in rows]


def _operands(probes: pd.DataFrame) -> list[OperandEffect]:
    rows = replay_effects.gradient_sensitivity(probes).to_dict("records")
    return [
        OperandEffect(str(row["module"]), str(row["role"]), str(row["method"]), float(row["relative_l2"]))
        for row in rows
    ]
