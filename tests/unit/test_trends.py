"""Trend, step and level tests: false alarms on autocorrelated noise, power on planted effects, coverage."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from mxprobe.attribution.trends import (
    MAX_POINTS,
    find_step,
    lag1,
    level,
    level_change,
    mann_kendall,
    paired_change,
    pooled,
)

PHIS = (0.0, 0.3, 0.6, 0.8)
N = 120
DRAWS = 300


def ar1(phi: float, draws: int, n: int = N, seed: int = 0) -> npt.NDArray[np.float64]:
    """[draws, n] of unit variance, started in the stationary state."""
    noise = np.random.default_rng(seed).standard_normal((draws, n))
    noise[:, 1:] *= math.sqrt(1 - phi**2)
    for t in range(1, n):
        noise[:, t] += phi * noise[:, t - 1]
    return noise


@pytest.mark.parametrize("phi", PHIS)
def test_trend_and_step_raise_few_false_alarms(phi: float) -> None:
    series = ar1(phi, DRAWS)
    trend = np.mean([t.p < 0.05 for row in series if (t := mann_kendall(row))])
    step = np.mean([s.p <= 0.05 for row in series if (s := find_step(row, n_resamples=199))])
    assert trend <= 0.12
    assert step <= 0.12


@pytest.mark.parametrize("phi", PHIS[:3])
def test_planted_ramps_and_steps_are_found(phi: float) -> None:
    series = ar1(phi, 100, seed=1)
    position = np.arange(N)
    ramps, steps = series + 4.0 * position / N, series - 2.0 * (position >= 70)
    assert np.mean([mann_kendall(row).direction() == "rising" for row in ramps]) > 0.9  # type: ignore[union-attr]
    found = [s for row in steps if (s := find_step(row, n_resamples=199))]
    assert np.mean([s.p <= 0.05 and s.after < s.before for s in found]) > 0.85
    assert np.median([s.at for s in found]) == pytest.approx(70, abs=2)


def test_without_the_inflation_the_trend_test_would_not_hold() -> None:
    """The reason the correction is there: the naive variance rejects several times too often."""
    series = ar1(0.8, DRAWS)
    naive = 0
    for row in series:
        trend = mann_kendall(row)
        assert trend is not None
        naive += abs(trend.z) * math.sqrt((1 + trend.lag1) / (1 - trend.lag1)) > 1.96
    assert naive / DRAWS > 0.3


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("n", [24, 60])
def test_intervals_cover(phi: float, n: int) -> None:
    a, b = ar1(phi, DRAWS, n, seed=2), ar1(phi, DRAWS, n, seed=3)
    covers = [(one := level(row)).low <= 0 <= one.high for row in a]
    assert np.mean(covers) > 0.85
    clear = [level_change(level(x), level(y)).is_clear for x, y in zip(a, b, strict=True)]
    assert np.mean(clear) < 0.12


def test_a_drift_is_part_of_the_level_and_what_both_share_is_no_noise() -> None:
    """Two runs that learn alike, one a little better: the difference is clear although both drift far more."""
    drift = np.linspace(0.0, 10.0, 24)
    a, b = ar1(0.3, 2, 24, seed=7)
    alone = level(drift + a)
    assert alone.high - alone.low < 2.0
    paired = paired_change(drift + a, drift + b + 2.0)
    assert paired.is_clear
    assert paired.low < 2.0 < paired.high
    bent = drift**2
    assert paired_change(bent + a, bent + b + 2.0).high - paired.high == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_change([1.0, 2.0], [1.0])


def test_short_constant_and_missing_values() -> None:
    assert mann_kendall([1.0, 2.0, 3.0]) is None
    assert find_step([1.0] * 15) is None
    flat = mann_kendall([2.0] * 40)
    assert flat is not None
    assert (flat.z, flat.p, flat.slope_per_step, flat.direction()) == (0.0, 1.0, 0.0, "flat")
    assert lag1([]) == 0.0
    assert lag1([3.0] * 20) == 0.0
    with_gaps = [float(i) if i % 3 else math.nan for i in range(60)]
    rising = mann_kendall(with_gaps)
    assert rising is not None
    assert rising.n == 40
    assert rising.direction() == "rising"


def test_levels_of_almost_nothing_promise_nothing() -> None:
    assert math.isnan(level([]).mean)
    one = level([0.5])
    assert (one.mean, one.low, one.high) == (0.5, -math.inf, math.inf)
    change = level_change(one, level([1.0, 1.1, 0.9]))
    assert not change.is_clear
    assert (change.low, change.high) == (-math.inf, math.inf)
    assert change.difference == pytest.approx(0.5)
    same = level_change(level([1.0] * 10), level([2.0] * 10))
    assert (same.difference, same.low, same.high) == (1.0, 1.0, 1.0)


def test_long_series_are_pooled_and_answers_stay_in_the_units_of_the_series() -> None:
    noise = np.random.default_rng(5).standard_normal(10_000)
    position = np.arange(10_000)
    trend = mann_kendall(noise + 1e-3 * position)
    assert trend is not None
    assert trend.n == MAX_POINTS
    assert trend.slope_per_step == pytest.approx(1e-3, rel=0.02)
    step = find_step(noise + (position >= 6_000), n_resamples=99)
    assert step is not None
    assert step.at == pytest.approx(6_000, abs=100)
    assert pooled(position).mean() == pytest.approx(position.mean())


def test_the_same_series_gives_the_same_answer() -> None:
    row = ar1(0.5, 1, seed=6)[0]
    assert find_step(row) == find_step(row)
