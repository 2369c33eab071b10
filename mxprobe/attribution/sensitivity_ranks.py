"""Which operands move the policy: Delta2 averaged over replayed microbatches, with intervals for their ranks.

    Delta2 = sum of delta_b^2 / n_tokens        predicted KL = Delta2 / 2        (mxprobe.measuring.replay.sensitivity)

First order: the sum over operands is a prediction of the whole only while the mismatch is small, and it does not see
experts being switched. `validity` holds it against replays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from .windows import last_steps, spanned, window_of

OPERAND = ("module", "role")
MIN_MICROBATCHES = 8
"""Replayed microbatches below which operands are not weighted by their sensitivity."""
N_RESAMPLES = 500
_SEED = 0

Array = npt.NDArray[np.float64]


def operand_sensitivity(sensitivity: pd.DataFrame, *, component: str = "total", level: float = 0.9) -> pd.DataFrame:
    """Return a row per operand of a `sensitivity` frame, the most sensitive first.

    Columns: `module`, `role`, `predicted_kl` (nats per token), `delta2`, `log_prob_shift`, `entropy_shift`,
    `n_microbatches`, and `rank`, `rank_low`, `rank_high`: 1 for the largest, the interval from resampling
    microbatches (steps and ranks). With fewer than two microbatches the interval is NaN.
    """
    rows = spanned(sensitivity[sensitivity["component"] == component])
    values = ["n_tokens", "sum_delta2", "sum_log_prob_shift", "sum_entropy_shift"]
    microbatch = ["step", "micro_step", "rank"] if "rank" in rows else ["step", "micro_step"]
    by_microbatch = rows.groupby([*OPERAND, *microbatch], observed=True, sort=True)
    sums = by_microbatch[values].sum(min_count=1).assign(n_steps=by_microbatch["n_steps"].max()).reset_index()
    if sums.empty:
        names = ["delta2", "predicted_kl", "log_prob_shift", "entropy_shift", "n_microbatches"]
        return pd.DataFrame(columns=[*OPERAND, *names, "rank", "rank_low", "rank_high"])
    totals = sums.groupby(list(OPERAND), observed=True, sort=True)[values].sum(min_count=1)
    tokens = totals["n_tokens"]
    delta2 = totals["sum_delta2"] / tokens
    found = pd.DataFrame(
        {
            "delta2": delta2,
            "predicted_kl": delta2 / 2.0,
            "log_prob_shift": totals["sum_log_prob_shift"] / tokens,
            "entropy_shift": totals["sum_entropy_shift"] / tokens,
            "n_microbatches": sums.groupby(list(OPERAND), observed=True, sort=True)["n_steps"].sum(),
        }
    )
    found["rank"] = found["delta2"].rank(ascending=False, method="first").astype(int)
    found["rank_low"], found["rank_high"] = _rank_intervals(sums, found.index, microbatch, level)
    return found.sort_values("rank").reset_index()


def _rank_intervals(
    sums: pd.DataFrame, operands: pd.Index, microbatch: Sequence[str], level: float
) -> tuple[Array, Array]:
    wide_delta = sums.pivot(index=list(microbatch), columns=list(OPERAND), values="sum_delta2")[operands]
    wide_tokens = sums.pivot(index=list(microbatch), columns=list(OPERAND), values="n_tokens")[operands]
    delta = wide_delta.fillna(0.0).to_numpy(dtype=float)
    tokens = wide_tokens.fillna(0.0).to_numpy(dtype=float)
    n = len(delta)
    if n < 2:
        nothing = np.full(len(operands), np.nan)
        return nothing, nothing
    drawn = np.random.default_rng(_SEED).multinomial(n, np.full(n, 1.0 / n), size=N_RESAMPLES).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = np.nan_to_num((drawn @ delta) / (drawn @ tokens))
    ranks = (-resampled).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable") + 1.0
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(ranks, [tail, 1.0 - tail], axis=0).astype(np.float64)
    return low, high


def validity(sensitivity: pd.DataFrame, replays: pd.DataFrame) -> pd.DataFrame:
    """Return predicted and replayed KL of all operands rounded together, per replayed step or window of old ones.

    Columns: `step`, `predicted_kl` (the sum over operands), `replayed_kl` (arm `q`), `ratio`, and `is_valid`: the
    ratio lies in [1/2, 2] and the replayed KL is under a tenth of a nat. Effects of operands interact, so that the
    ratio is not 1 even where each is predicted well.
    """
    parts = sensitivity[sensitivity["component"] == "total"]
    one = parts.groupby(["step", *OPERAND], observed=True)[["sum_delta2", "n_tokens"]].sum()
    predicted = (one["sum_delta2"] / one["n_tokens"] / 2.0).groupby(level="step").sum()
    last = last_steps(parts)
    first = last.index.to_numpy(dtype=np.int64)
    window = window_of(replays["step"].to_numpy(dtype=np.int64), first, last.to_numpy(dtype=np.int64))
    held = (replays["arm"] == "q").to_numpy() & (window >= 0)  # `replays` is never thinned
    arms = replays[held].assign(step=first[window[held]]).groupby("step", observed=True)[["sum_kl", "n_tokens"]].sum()
    frame = pd.DataFrame({"predicted_kl": predicted, "replayed_kl": arms["sum_kl"] / arms["n_tokens"]}).dropna()
    ratio = frame["predicted_kl"] / frame["replayed_kl"].where(frame["replayed_kl"] > 0)
    is_valid = ratio.between(0.5, 2.0) & (frame["replayed_kl"] < 0.1)
    return frame.assign(ratio=ratio, is_valid=is_valid).reset_index(names="step")


def is_valid(checked: pd.DataFrame) -> bool:
    """Whether more than half of the rows of `validity` hold; False where nothing was replayed."""
    return bool(len(checked)) and float(checked["is_valid"].mean()) > 0.5
