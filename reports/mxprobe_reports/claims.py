"""The paper's three claims as hypotheses on this run: what the trace measures of each, and what it cannot say.

Sources: arXiv 2605.20402 for the claims; science, section 7, for why they are not taken over. What a trace of one run
holds can be consistent with a claim or speak against it. A cause needs a replay in which one part is taken away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup

from mxprobe.attribution import Evidence, Recommendation, ratios
from mxprobe.numbers import number, percent
from mxprobe.schema import DELTA_BINS, Role, Verdict

from . import names
from .operands import Operands
from .rendering import render
from .symptoms import Signal

_WGRAD = (Role.G_WGRAD.value, Role.X_WGRAD.value)
_DGRAD = (Role.G_DGRAD.value, Role.W_DGRAD.value)
_FORWARD = (Role.X_FWD.value, Role.W_FWD.value)


_UNKNOWN, _CONSISTENT, _NOT_SEEN = "cannot be told from this trace", "consistent with it", "not what is seen here"


@dataclass(frozen=True)
class Claim:
    reading: str
    """One of the three above."""
    kind: str
    """`measured`, `predicted` or `associated`."""
    measured: Sequence[str]


def section(
    operands: Operands, recommendation: Recommendation, signals: Sequence[Signal], *, has_noise: bool = False
) -> Markup:
    """Return the card. `has_noise`: the sampling noise of the gradient was measured."""
    return render(
        "claims.html",
        scale=scale_and_gradient(operands),
        deadzone=deadzone_and_rollout(operands, recommendation),
        grid=grid_and_entropy(operands, signals),
        has_noise=has_noise,
    )


def scale_and_gradient(operands: Operands) -> Claim:
    """Judge "scale bias -> gradient" by shares of the local dW error and the gain that compounds with depth."""
    split = _split(operands, _WGRAD)
    if split is None:
        return Claim(_UNKNOWN, "measured", ["No wgrad operand was measured."])
    said = [f"Of the local error of dW, {_shares(split)}."]
    depth = compounding(operands)
    if depth is not None:
        gain, delta, n_layers = depth
        said.append(
            f"What compounds is the gain β = <Q(x), x>/‖x‖²: log2(β_G β_W) of the dgrad operands, one Linear for each "
            f"of {n_layers} layers, adds up to {number(gain)} bits. The sum of log2(s/s*), a heuristic "
            f"(delta_sum_heuristic), would be {number(delta)} bits."
        )
    is_largest = split["scale"] > max(split["deadzone"], 0.0)
    most = "the largest" if is_largest else "not the largest"
    said.append(f"As a what-if on the backward, scale is {most} removable part; the grid stays under any scale.")
    return Claim(_CONSISTENT if is_largest else _NOT_SEEN, "predicted", said)


def compounding(operands: Operands) -> tuple[float, float, int] | None:
    """Return (sum over depth of log2(beta_G beta_W), the same of mean log2(s/s*), layers); None without dgrad operands.

    Per layer the mean over its modules: a path through a layer passes through some of them, and which is not known.
    """
    roles = {operands.roles.index(role) for role in _DGRAD if role in operands.roles}
    if len(roles) < len(_DGRAD):
        return None
    chosen = operands.totals["role"].isin(roles).to_numpy()
    beta = ratios.tensor_ratios(operands.totals)["gain"].to_numpy(dtype=float)
    centres = (np.arange(DELTA_BINS) + 0.5) / DELTA_BINS
    n_blocks = operands.delta.sum(axis=1)
    delta = np.divide(operands.delta @ centres, n_blocks, out=np.full(len(beta), np.nan), where=n_blocks > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_gain = np.log2(np.where(beta > 0, beta, np.nan))
    blocks = [names.block_of(operands.modules[int(m)]) for m in operands.totals["module"]]
    frame = pd.DataFrame({"block": blocks, "role": operands.totals["role"], "gain": log_gain, "delta": delta})[chosen]
    layers = frame.groupby(["block", "role"])[["gain", "delta"]].mean().groupby("block").sum(min_count=len(_DGRAD))
    layers = layers.dropna()
    return (float(layers["gain"].sum()), float(layers["delta"].sum()), len(layers)) if len(layers) else None


def deadzone_and_rollout(operands: Operands, recommendation: Recommendation) -> Claim:
    """Judge "deadzone -> rollout" by the forward error made on zeroed values, beside the mismatch."""
    zeroed, seen = recommendation.shares.get("zeroed", math.nan), _evidence(recommendation, "mismatch")
    if not math.isfinite(zeroed) or recommendation.verdict is Verdict.NOTHING_QUANTIZED:
        forward = _split(operands, _FORWARD)
        would = [] if forward is None else [f"MXFP4 would make an output error of which {_shares(forward)}."]
        return Claim(_UNKNOWN, "predicted", ["Nothing quantized was seen in the forward.", *would])
    said = [f"Of the output error of the quantized operands, {percent(zeroed)} is made on values rounded to zero."]
    if seen is None or seen.value is None:
        return Claim(_UNKNOWN, "measured", [*said, "Rollout and training were not both seen."])
    threshold = "" if seen.threshold is None else f", its threshold {number(seen.threshold)}"
    said.append(f"The mismatch of rollout and training is {number(seen.value)}{threshold}.")
    if not seen.holds:
        return Claim(_NOT_SEEN, "measured", [*said, "There is no mismatch to explain."])
    if recommendation.verdict is Verdict.NOT_EXPLAINED:
        said.append("The layers do not do what rounding predicts, so no part of it explains the mismatch.")
        return Claim(_NOT_SEEN, "measured", said)
    holds = zeroed >= recommendation.thresholds.component_share
    return Claim(_CONSISTENT if holds else _NOT_SEEN, "measured", said)


def grid_and_entropy(operands: Operands, signals: Sequence[Signal]) -> Claim:
    """Show what there is of "grid noise -> entropy": one run never decides, healthy runs lose half of their entropy."""
    said: list[str] = []
    forward = _split(operands, _FORWARD)
    if forward is not None:
        said.append(f"Grid makes {percent(forward['grid'])} of the output error of forward operands.")
    entropy = next((signal for signal in signals if signal.id == "entropy" and len(signal.steps)), None)
    if entropy is not None:
        trend = "" if entropy.change is None else f" (trend: {entropy.change.trend})"
        said.append(f"Entropy went from {number(entropy.first)} to {number(entropy.recent)}{trend}.")
    return Claim(_UNKNOWN, "associated", said or ["Neither was measured."])


def _split(operands: Operands, roles: Sequence[str]) -> dict[str, float] | None:
    """Return the remainder split of the output error over operands of these roles, each weighed by its error."""
    positions = [operands.roles.index(role) for role in roles if role in operands.roles]
    found = ratios.output_ratios(operands.totals)[operands.totals["role"].isin(positions).to_numpy()]
    error = found["out_error"].to_numpy(dtype=float)
    measured = np.isfinite(error)
    if not measured.any() or error[measured].sum() <= 0:
        return None
    whole = error[measured].sum()
    return {
        name: float((found[f"out_{name}"].to_numpy(dtype=float)[measured] * error[measured]).sum() / whole)
        for name in ("scale", "deadzone", "grid")
    }


def _shares(split: dict[str, float]) -> str:
    return ", ".join(f"{percent(share)} is {name}" for name, share in split.items())


def _evidence(recommendation: Recommendation, name: str) -> Evidence | None:
    return next((each for each in recommendation.evidence if each.name == name), None)
