"""The demo predicts what its second run, with the correction, will do; this module says whether it did.

    replayed KL   KL(rollout || trainer) on a run's last weights, exact, nats per token
    mismatch      mean k3 of the run's own tokens over the last half of its probed steps, as the agent measured it

    predicted replayed KL = KL on the first run's last weights with the correction applied
    predicted mismatch    = mismatch of the first run x (KL with the correction / KL without it)

The second run ends at other weights than the first. They are those of a run whose rollout and trainer agree, so its KL
is mostly the smaller one: `DOWN` and `UP` are how far off it may be. That, and the spread over batches, is the stated
interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mxprobe.attribution.intervals import t_quantile
from mxprobe.trace import Trace

DOWN, UP = 12.0, 3.0
"""Factors between a KL on one run's last weights and on another's, set wider than what the demo's seeds 0 and 1 and
three seeds of `benchmarks/rl.py` showed (.12 to 1.6); seeds 2 to 9 were not looked at (`benchmarks/demo_seeds.py`)."""


@dataclass(frozen=True)
class Replay:
    """KL by batch on one run's last weights; the batches are the same in both."""

    plain: tuple[float, ...]
    corrected: tuple[float, ...]


class Outcome(StrEnum):
    AS_PREDICTED = "as predicted"
    FURTHER = "further than predicted"
    LESS = "less than predicted"
    NOT = "did not move"


@dataclass(frozen=True)
class Prediction:
    """One measure: before, what was predicted of the second run with its 95 % interval, and what it was."""

    measure: str
    before: float
    predicted: float
    low: float
    high: float
    after: float

    @property
    def outcome(self) -> Outcome:
        """It was predicted to fall into the interval; rising where a fall was predicted is never as predicted."""
        if self.after >= self.before:
            return Outcome.NOT
        if self.after > self.high:
            return Outcome.LESS
        return Outcome.AS_PREDICTED if self.after >= self.low else Outcome.FURTHER


def mismatch_of(trace: Trace) -> float:
    """Return the mean k3 per token over the last half of the probed steps; NaN if there are none.

    It is an estimate of KL(rollout || trainer).
    """
    rows = trace.rollouts()
    rows = rows[rows["stratum"].astype(str) == "all"].sort_values("step")
    rows = rows.tail(math.ceil(len(rows) / 2))
    n_tokens = float(rows["n_tokens"].sum())
    return float(rows["sum_k3"].sum()) / n_tokens if n_tokens else math.nan


def predict(first: Replay, second: Replay, mismatch: tuple[float, float]) -> tuple[Prediction, Prediction]:
    """Return the predictions of replayed KL and of mismatch; `mismatch` is that of the first and of the second run."""
    before, predicted = statistics.fmean(first.plain), statistics.fmean(first.corrected)
    ratio = predicted / before
    spread = _half_width([after / plain for plain, after in zip(first.plain, first.corrected, strict=True)], ratio)
    after, kl_spread = statistics.fmean(second.corrected), _half_width(first.corrected, predicted)
    kl = Prediction("replayed KL", before, predicted, *_interval(predicted, kl_spread), after)
    expected = mismatch[0] * ratio
    return kl, Prediction("mismatch", mismatch[0], expected, *_interval(expected, spread), mismatch[1])


def _half_width(values: Sequence[float], mean: float) -> float:
    """Return the half width of the 95 % t interval of the mean, relative to the mean."""
    return t_quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) / mean


def _interval(value: float, half_width: float) -> tuple[float, float]:
    return value / (DOWN * (1.0 + half_width)), value * UP * (1.0 + half_width)
