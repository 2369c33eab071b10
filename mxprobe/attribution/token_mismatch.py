"""What rollout and trainer say of the same tokens, and whose weights the rollout uses: tables `rollouts`, `outputs`.

Per token d = log p_rollout - log p_train, w = exp(-d).

    mean |d|        against its floor        ESS = (sum w)^2 / (n sum w^2)

The floor is what two orders of summing the same numbers make of log-probabilities in the dtype they are computed in:
a cached one-token forward against a whole one. See `FLOOR_NATS`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.numbers import number
from mxprobe.schema import Phase
from mxprobe.trace import Trace

from .thresholds import Thresholds
from .windows import Steps, spanned, window_of
from .words import listed

Array = npt.NDArray[np.float64]

GENERATION = "generation"
"""`source` of rows measured in the run's own process."""
SUMS = ("n_tokens", "sum_d", "sum_abs_d", "sum_k3", "sum_w", "sum_w2")
FLOOR_NATS = {"float64": 1e-6, "float32": 1e-3}
"""Mean |d| of equal policies, generously. On the healthy demo (float32, MXFP4 on both sides) it is 0 in most steps
and at worst 2.8e-3: a last bit sends a value to the other side of a rounding tie."""
FLOOR_NATS_16_BIT = 0.02
"""Logits near 10 are rounded by 2^-8 of that in bfloat16. An estimate, not measured on a large model."""
MIN_DRIFT_CLUSTERS = 8
BEHIND_SHARE = 0.5
"""Part of a module's probed rollouts that must use older weights for it to be called behind."""


@dataclass(frozen=True)
class LogProbs:
    """Sums over tokens per cluster [T], 0 where nothing was measured."""

    sums: dict[str, Array]
    dtype: str
    floor_kl: float = math.nan
    """KL per token of the same batch in high precision, put together otherwise; NaN where no replay measured it."""
    floor_abs_d: float = math.nan

    def n_tokens(self, weights: Array) -> float:
        return float(weights @ self.sums["n_tokens"])

    def abs_d(self, weights: Array) -> float:
        """Mean |d| in nats per token."""
        return float(weights @ self.sums["sum_abs_d"]) / self.n_tokens(weights)

    def kl(self, weights: Array) -> float:
        """KL(rollout || train) per token in nats, by k3."""
        return float(weights @ self.sums["sum_k3"]) / self.n_tokens(weights)

    def ess_loss(self, weights: Array) -> float:
        """1 - ESS of the importance weights, over clusters: sums of each first, so that steps do not mix."""
        n, w, w2 = (self.sums[name] for name in ("n_tokens", "sum_w", "sum_w2"))
        seen = w2 > 0
        ess = np.zeros_like(n)
        ess[seen] = w[seen] ** 2 / w2[seen]
        return 1.0 - float(weights @ ess) / self.n_tokens(weights)

    @property
    def floor(self) -> float:
        """Mean |d| of equal policies. In float32 not less than what ties make of it where both sides quantize."""
        estimate = FLOOR_NATS.get(self.dtype)
        if math.isnan(self.floor_abs_d):
            return FLOOR_NATS_16_BIT if estimate is None else estimate
        return self.floor_abs_d if estimate is None else max(estimate, self.floor_abs_d)

    def kl_over_floor(self, weights: Array) -> float:
        """KL as a multiple of the measured floor; NaN where none was measured, inf where it is 0."""
        if not self.floor_kl > 0:
            return math.inf if self.floor_kl == 0 else math.nan
        return self.kl(weights) / self.floor_kl

    def floor_words(self, weights: Array) -> str:
        """`40 times its measured floor of 2e-5 nats`, `the floor of mean |d| in bfloat16 is 0.02 (an estimate)`."""
        multiple = self.kl_over_floor(weights)
        if math.isnan(multiple):
            return f"the floor of mean |d| in {self.dtype} is {number(self.floor)} (an estimate; a replay measures it)"
        if math.isinf(multiple):
            return "its measured floor is 0: the same batch put together otherwise gives the same bits"
        return f"{multiple:.3g} times its measured floor of {number(self.floor_kl)} nats"

    def drift(self) -> float | None:
        """Mean |d| in the last quarter of the clusters over that in the first; None with fewer than 8, or from 0."""
        seen = np.flatnonzero(self.sums["n_tokens"] > 0)
        if len(seen) < MIN_DRIFT_CLUSTERS:
            return None
        quarter = len(seen) // 4
        total, n = self.sums["sum_abs_d"], self.sums["n_tokens"]
        first, last = (float(total[at].sum() / n[at].sum()) for at in (seen[:quarter], seen[-quarter:]))
        return last / first if first > 0 else None

    def gate(self, thresholds: Thresholds) -> float:
        """What mean |d| must exceed to be a symptom."""
        return thresholds.mismatch_floor_factor * self.floor

    def is_symptom(self, weights: Array, thresholds: Thresholds) -> bool:
        return self.abs_d(weights) > self.gate(thresholds) or self.ess_loss(weights) > thresholds.ess_loss


@dataclass(frozen=True)
class Behind:
    """A module whose rollouts were computed with older weights of the trainer."""

    module: str
    lag: int
    """Steps, of the last probed rollout."""
    step: int
    """Whose weights those were."""


@dataclass(frozen=True)
class Sides:
    """Empty where a trace holds neither: it was made by an older version, or the agent could not measure it."""

    log_probs: LogProbs | None = None
    behind: tuple[Behind, ...] = ()

    def seen(self, weights: Array) -> LogProbs | None:
        """The log-probabilities, where these clusters hold any."""
        found = self.log_probs
        return found if found is not None and found.n_tokens(weights) > 0 else None


def both_sides(trace: Trace, steps: Steps, last: Steps, n_clusters: int) -> Sides:
    """Read from a trace, on the clusters of `measure`; `last`: of each of its steps, the last one added up in it."""
    log_probs = log_probs_of(trace.rollouts(), steps, last, n_clusters)
    if log_probs is not None:
        floor_kl, floor_abs_d = measured_floor(trace.replays())
        log_probs = replace(log_probs, floor_kl=floor_kl, floor_abs_d=floor_abs_d)
    return Sides(log_probs, modules_behind(trace.table("outputs", _LAG)))


def measured_floor(replays: pd.DataFrame) -> tuple[float, float]:
    """KL and mean |d| per token of arm `floor`; NaN without one. |d| from its mean square, as of a Gaussian."""
    rows = replays[replays["arm"].astype(str) == "floor"]
    n = float(rows["n_tokens"].sum())
    if not n > 0:
        return math.nan, math.nan
    kl, square = (float(rows[name].sum(min_count=1)) / n for name in ("sum_kl", "sum_log_prob_shift2"))
    return max(kl, 0.0), math.sqrt(2.0 / math.pi * square) if square >= 0 else math.nan


def of_one_source(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of table `rollouts` from a single source: the same tokens may be told of twice, by the model and the batch.

    Generation in the run's own process goes first, for its log-probabilities are measured; of the batches that
    frameworks hold, the one with most tokens.
    """
    source = rows["source"].astype(object).fillna(GENERATION).astype(str)  # none in traces of older versions
    tokens = rows["n_tokens"].where(rows["stratum"] == "all", 0).groupby(source).sum()
    if tokens.empty:
        return rows
    return rows[source == (GENERATION if tokens.get(GENERATION, 0) > 0 else str(tokens.idxmax()))]


def all_tokens(rollouts: pd.DataFrame) -> pd.DataFrame:
    """Rows over all tokens, of one source."""
    rows = of_one_source(rollouts)
    return rows[(rows["stratum"].astype(str) == "all").to_numpy()]


def log_probs_of(rows: pd.DataFrame, steps: Steps, last: Steps, n_clusters: int) -> LogProbs | None:
    """Sums per cluster, each step in the one that its window `steps` to `last` is in; None where there is none."""
    window = window_of(rows["step"].to_numpy(dtype=np.int64), steps, last)  # `rollouts` is never thinned
    rows = all_tokens(rows.assign(window=window)[window >= 0])
    if rows.empty:
        return None
    cluster = rows["window"].to_numpy() * n_clusters // max(steps.size, 1)
    sums = {name: np.zeros(n_clusters) for name in SUMS}
    for name, total in sums.items():
        np.add.at(total, cluster, rows[name].to_numpy(dtype=float))
    dtypes = rows["dtype"].dropna().astype(str).mode()
    return LogProbs(sums, dtypes.iloc[0] if len(dtypes) else "an unknown dtype")


_LAG = ("step", "n_steps", "last_step", "module", "phase", "weight_lag")


def modules_behind(outputs: pd.DataFrame) -> tuple[Behind, ...]:
    """Modules of which most probed rollouts, those with known weights, lag behind the trainer."""
    rows = spanned(outputs[(outputs["phase"] == Phase.ROLLOUT.value) & outputs["weight_lag"].notna()])
    found: list[Behind] = []
    for module, part in rows.sort_values("last_step").groupby("module", observed=True, sort=False):
        lag = part["weight_lag"].to_numpy(dtype=int)
        if np.average(lag > 0, weights=part["n_steps"].to_numpy(dtype=float)) > BEHIND_SHARE:
            last = int(np.flatnonzero(lag > 0)[-1])
            found.append(Behind(str(module), int(lag[last]), int(part["last_step"].iloc[last] - lag[last])))
    return tuple(found)


def behind_words(behind: Sequence[Behind]) -> str:
    """`q_proj and k_proj use the weights of step 30, 12 behind`."""
    lags = sorted({each.lag for each in behind})
    since = sorted({each.step for each in behind})
    names = listed(each.module for each in behind[:4]) if len(behind) <= 4 else f"{len(behind)} modules"
    verb = "computes" if len(behind) == 1 else "compute"
    at = f"step {since[0]}" if len(since) == 1 else f"steps {since[0]} to {since[-1]}"
    late = f"{lags[0]} steps" if len(lags) == 1 else f"{lags[0]} to {lags[-1]} steps"
    return f"{names} {verb} with the weights of {at}, {late} behind the trainer"
