"""Trend, step and level of a training curve, with p-values and intervals that know neighbouring steps are alike.

    r      = (n r1 + 1) / (n - 4)              lag-1 autocorrelation, Kendall's bias correction, cut to [0, .95]
    trend    Mann-Kendall S; var(S) inflated by (1 + r) / (1 - r); r of the series less its Theil-Sen line
    step     max over k of |mean after - mean before| sqrt(k (n - k) / n), against a circular block bootstrap
    level    mean +- t sqrt(var / n_eff),  n_eff = n (1 - r) / (1 + r); var and r of what a straight line leaves

Science, section 7. A trend or step of one run is "associated with" what happened then, not caused by it: healthy
runs lose half of their entropy. Series longer than 1,000 points are pooled into 1,000 means first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .intervals import t_quantile

Array = npt.NDArray[np.float64]

MAX_POINTS = 1_000
MIN_POINTS = 8
ALPHA = 0.01
"""Level of the trend test: false alarms in .007 to .020 of AR(1) series of phi 0 to .8 (benchmarks/trends.py)."""
_MAX_LAG1 = 0.95
_MIN_EFFECTIVE = 4.0
_SEED = 0x74726E64


@dataclass(frozen=True)
class Trend:
    """Mann-Kendall's answer. `slope_per_step` is Theil-Sen's, per position in the series."""

    z: float
    p: float
    slope_per_step: float
    lag1: float
    n: int

    def direction(self, alpha: float = ALPHA) -> str:
        """Return `rising`, `falling`, or `flat` where the test does not reject."""
        if not self.p < alpha:
            return "flat"
        return "rising" if self.z > 0 else "falling"


@dataclass(frozen=True)
class Step:
    """The most likely place of one step: the series before `at`, and from `at` on."""

    at: int
    before: float
    after: float
    p: float


@dataclass(frozen=True)
class Level:
    """Mean of a stretch of a series and its interval; the whole line where there are fewer than three points."""

    mean: float
    low: float
    high: float
    n: int
    n_effective: float
    variance: float = math.nan
    """Of the points about a straight line; NaN where there are fewer than three."""

    @property
    def standard_error2(self) -> float:
        """Return the squared standard error of the mean; NaN where it is not known."""
        return self.variance / self.n_effective


@dataclass(frozen=True)
class Change:
    """B's level less A's."""

    difference: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def lag1(values: Sequence[float] | Array, *, n_fitted: int = 1) -> float:
    """Return the lag-1 autocorrelation, bias-corrected; in [0, .95]. 0 for a constant or with fewer than 6 points.

    `n_fitted` counts what was taken off before: 1 the mean, 2 a line; each costs a bias of about -1/n at 0. Negative
    estimates count as 0: they would shrink intervals on the strength of a few points.
    """
    y = np.asarray(values, dtype=np.float64)
    y = y - y.mean() if y.size else y
    energy = float(y @ y)
    if y.size < 6 or energy <= 0:
        return 0.0
    raw = float(y[1:] @ y[:-1]) / energy
    return min(max((y.size * raw + n_fitted) / (y.size - 4.0), 0.0), _MAX_LAG1)


def mann_kendall(values: Sequence[float] | Array) -> Trend | None:
    """Return the monotone trend of equally spaced values. None with fewer than 8 finite ones."""
    y = pooled(values)
    n = y.size
    if n < MIN_POINTS:
        return None
    later, earlier = np.triu_indices(n, 1)[::-1]
    rises = y[later] - y[earlier]
    s = float(np.sign(rises).sum())
    slope = float(np.median(rises / (later - earlier)))
    _, ties = np.unique(y, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18.0
    r = lag1(y - slope * np.arange(n))
    variance *= (1.0 + r) / (1.0 - r)
    z = (s - math.copysign(1.0, s)) / math.sqrt(variance) if variance > 0 and s != 0 else 0.0
    p = 2.0 * NormalDist().cdf(-abs(z))
    scale = n / max(np.isfinite(np.asarray(values, dtype=np.float64)).sum(), 1)
    return Trend(z, p, slope * scale, r, n)


def find_step(values: Sequence[float] | Array, *, n_resamples: int = 499) -> Step | None:
    """Return the step that explains most, at least a tenth (and 4 points) from the ends. None below 16 finite values.

    Under the null the series is its own noise: blocks are drawn from it whole, mean removed, so a true step makes
    the test a little shy and never bold. Blocks are max(4, 1.75 n^(1/3)), longer where the autocorrelation asks for
    it (Carlstein's rule for AR(1)). The seed is fixed: the same series gives the same p.
    """
    y = pooled(values)
    n = y.size
    if n < 2 * MIN_POINTS:
        return None
    margin = max(n // 10, 4)
    statistics = _cusum(y[None, :], margin)[0]
    at = int(statistics.argmax()) + 1
    length = _block_length(n, lag1(y))
    n_blocks = -(-n // length)
    generator = np.random.default_rng(_SEED)
    starts = generator.integers(0, n, (n_resamples, n_blocks))
    index = (starts[:, :, None] + np.arange(length)).reshape(n_resamples, -1)[:, :n] % n
    null = _cusum((y - y.mean())[index], margin).max(axis=1)
    p = (1.0 + float((null >= statistics[at - 1]).sum())) / (n_resamples + 1.0)
    finite = int(np.isfinite(np.asarray(values, dtype=np.float64)).sum())
    return Step(round(at * finite / n), float(y[:at].mean()), float(y[at:].mean()), p)


def level(values: Sequence[float] | Array, *, confidence: float = 0.95) -> Level:
    """Return the mean of the finite values with a t interval at the effective number of points (4 or more).

    A steady drift is part of the level, not noise about it, so it is taken off before the noise is judged. On AR(1)
    noise of phi 0 to .6 a 95 % interval covers .88-.98 with 12 points and .92-.97 with 24 or more; of phi .8, .83 and
    .90-.94 (benchmarks/trends.py).
    """
    y = np.asarray(values, dtype=np.float64)
    y = y[np.isfinite(y)]
    n = y.size
    mean = float(y.mean()) if n else math.nan
    if n < 3:
        return Level(mean, -math.inf, math.inf, n, float(n))
    t = np.arange(n) - (n - 1) / 2.0
    rest = y - mean - t * (float(t @ y) / float(t @ t))
    r = lag1(rest, n_fitted=2)
    inflation = (1.0 + r) / (1.0 - r)
    n_effective = max(n / inflation, min(n, _MIN_EFFECTIVE))
    variance = float(rest @ rest) / (n - 2) / (1.0 - min(2.0 * inflation / n, 0.5))
    half = t_quantile(0.5 + confidence / 2.0, max(n_effective - 2.0, 1.0)) * math.sqrt(variance / n_effective)
    return Level(mean, mean - half, mean + half, n, n_effective, variance)


def level_change(a: Level, b: Level, *, confidence: float = 0.95) -> Change:
    """Return B's mean less A's with Welch's t interval at the effective numbers of points.

    Unbounded where one has < 3.
    """
    parts = (a.standard_error2, b.standard_error2)
    difference = b.mean - a.mean
    total = sum(parts)
    if not math.isfinite(total):
        return Change(difference, -math.inf, math.inf)
    if total <= 0:
        return Change(difference, difference, difference)
    degrees = total**2 / sum(
        part**2 / max(each.n_effective - 2.0, 1.0) for part, each in zip(parts, (a, b), strict=True)
    )
    half = t_quantile(0.5 + confidence / 2.0, max(degrees, 1.0)) * math.sqrt(total)
    return Change(difference, difference - half, difference + half)


def paired_change(a: Sequence[float] | Array, b: Sequence[float] | Array, *, confidence: float = 0.95) -> Change:
    """Return the mean of b(t) - a(t) with its interval: what moves both alike is no noise.

    ValueError for unequal lengths.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape:
        raise ValueError(f"{x.size} values cannot be paired with {y.size}")
    found = level(y - x, confidence=confidence)
    return Change(found.mean, found.low, found.high)


def pooled(values: Sequence[float] | Array) -> Array:
    """Return the finite values in order; above 1,000, means of neighbours."""
    y = np.asarray(values, dtype=np.float64)
    y = y[np.isfinite(y)]
    if y.size <= MAX_POINTS:
        return y
    edges = np.linspace(0, y.size, MAX_POINTS + 1).astype(np.intp)[:-1]
    return np.add.reduceat(y, edges) / np.diff(np.append(edges, y.size))


def _cusum(rows: Array, margin: int) -> Array:
    """Return, for rows [B, n], the statistic [B, n - 1] of a step after each point; 0 within `margin` of the ends."""
    n = rows.shape[1]
    k = np.arange(1, n)
    sums = np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1)[:, :-1]
    statistics = np.abs(sums) * np.sqrt(n / (k * (n - k)))
    statistics[:, : margin - 1] = 0.0
    statistics[:, n - margin :] = 0.0
    return statistics


def _block_length(n: int, r: float) -> int:
    carlstein = (math.sqrt(6.0) * r / (1.0 - r**2)) ** (2.0 / 3.0) * n ** (1.0 / 3.0)
    return min(max(4, round(1.75 * n ** (1.0 / 3.0)), round(carlstein)), n // 3)
