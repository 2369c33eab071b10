"""How much of the train-rollout mismatch rounding explains: replays held against the log-probabilities of both sides.

    d = log p_rollout - log p_train of sampled tokens, observed            d_q = log p_q - log p_high, replayed
    explained = E[d_q^2] / E[d^2], at most 1            not explained = 1 - explained

Both of the run's own tokens, in the steps that have both, so that neither the direction of a KL nor the tail of an
importance weight is in the way. It says something where the rollout rounds as the arm `q` does, or in no known way,
and the trainer does not round: else it is withheld. The t interval is over steps.
"""

import math
from dataclasses import dataclass

import pandas as pd

from mxprobe.schema import Phase

from .replay_effects import PLAIN, ratio_of
from .token_mismatch import all_tokens

MOST = 0.5
"""Part of the Linears reproduced exactly that must round as the arm does."""
NO_STEP = "no step has both a replay of the arm q and log-probabilities of rollout and trainer"
OTHERWISE = "most Linears of the rollout are known to round otherwise than the arm q of the replays"
BOTH = "the trainer rounds as well: rounding alone makes no mismatch there"


@dataclass(frozen=True)
class ExplainedMismatch:
    """Mean squares in nats^2 per token. `share` is not cut off at 1; NaN where withheld."""

    share: float
    low: float
    high: float
    observed: float
    replayed: float
    n_steps: int
    withheld: str = ""


def explained_mismatch(rollouts: pd.DataFrame, replays: pd.DataFrame, outputs: pd.DataFrame) -> ExplainedMismatch:
    rows = all_tokens(rollouts)
    plain = replays[(replays["arm"].astype(str) == PLAIN).to_numpy()]
    both = pd.concat(
        (_mean(rows, "sum_d2").rename("observed"), _mean(plain, "sum_log_prob_shift2").rename("replayed")), axis=1
    ).dropna()
    why = NO_STEP if both.empty else _why_not(outputs, f"{plain['format'].iloc[0]}+{plain['rule'].iloc[0]}")
    if why:
        return ExplainedMismatch(math.nan, math.nan, math.nan, math.nan, math.nan, len(both), why)
    share = ratio_of(both["replayed"].to_numpy(dtype=float), both["observed"].to_numpy(dtype=float))
    observed, replayed = (float(both[name].mean()) for name in ("observed", "replayed"))
    return ExplainedMismatch(share.value, share.low, share.high, observed, replayed, share.n)


def _mean(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return the mean per token, by step."""
    sums = rows.groupby("step")[[name, "n_tokens"]].sum(min_count=1).astype(float)
    return sums[name] / sums["n_tokens"].where(sums["n_tokens"] > 0)


def _why_not(outputs: pd.DataFrame, recipe: str) -> str:
    """Return why the share is withheld. Linears whose outputs no recipe reproduces do not speak against the arm."""

    def share_of(phase: Phase, wanted: str) -> float:
        seen = outputs[(outputs["phase"].astype(str) == phase.value).to_numpy()]
        seen = seen[seen["exact"].fillna(False).astype(bool).to_numpy()]
        alike = (seen["recipe_x"].astype(str) == wanted) & (seen["recipe_w"].astype(str) == wanted)
        return float(alike.mean()) if len(seen) else 1.0

    if share_of(Phase.ROLLOUT, recipe) <= MOST:
        return OTHERWISE
    return "" if share_of(Phase.TRAIN, "none") > MOST else BOTH
