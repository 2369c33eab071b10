"""A ratio of sums over clusters, and its t interval.

    ratio = sum_t w_t N_t / sum_t w_t D_t           gain of a correction: 1 - ratio, N: error with it, D: without
    z_t   = N_t - ratio D_t                         linearised ratio (delta method)
    se^2  = sum_t w_t z_t^2 / (n (n - 1)) / mean(D)^2,   n = sum_t w_t

Pairing within a step removes what both have in common, so the interval is about the ratio, not the step.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from mxprobe.numbers import fixed, interval

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gain:
    value: float
    low: float
    high: float
    n: int

    @property
    def words(self) -> str:
        """`0.71 [0.64, 0.77]`."""
        return interval(self.value, self.low, self.high, fixed)


def gain_of(after: Array, before: Array, weights: Array, *, confidence: float = 0.95) -> Gain:
    """Return the gain from per-cluster errors `after` and `before` [T] with resampling weights [T].

    Clusters with no error before count nothing. With fewer than two clusters the interval is the whole line.
    """
    used = (before > 0) & (weights > 0)
    left, half, n = ratio_and_half(after[used], before[used], weights[used], confidence)
    low, high = (-math.inf, math.inf) if math.isnan(left) else (1.0 - left - half, 1.0 - left + half)
    return Gain(1.0 - left, low, high, n)


def ratio_and_half(above: Array, below: Array, weights: Array, confidence: float) -> tuple[float, float, int]:
    """Return (ratio, half its interval, n) of values [T] with resampling weights [T].

    The ratio is NaN where the sum below is not positive, the interval infinite with fewer than two clusters.
    """
    n, total = float(weights.sum()), float(weights @ below)
    if total <= 0:
        return math.nan, math.nan, len(below)
    ratio = float(weights @ above) / total
    if n < 2:
        return ratio, math.inf, int(n)
    z = above - ratio * below
    standard_error = math.sqrt(float(weights @ z**2) / (n * (n - 1.0))) / (total / n)
    return ratio, t_quantile(0.5 + confidence / 2.0, n - 1.0) * standard_error, int(n)


def t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t for 1 or more degrees of freedom; Cornish-Fisher, within 0.2 % from 4 upwards.

    For 1, 2 and 3 degrees the expansion is poor; there the closed forms, or bisection of one, are used.
    """
    if degrees < 4:
        return _t_quantile_small(probability, round(degrees))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160.0,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _t_quantile_small(probability: float, degrees: int) -> float:
    if degrees <= 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        a = 4.0 * probability * (1.0 - probability)
        return 2.0 * (probability - 0.5) * math.sqrt(2.0 / a)
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2.0
        u = middle / math.sqrt(3.0)
        below = 0.5 + (u / (1.0 + u**2) + math.atan(u)) / math.pi
        low, high = (middle, high) if below < probability else (low, middle)
    return (low + high) / 2.0
