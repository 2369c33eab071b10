"""Trends and steps of the signals: found where planted, not found in noise, never told as causes."""

import numpy as np
import numpy.typing as npt

from mxprobe_reports import changes, symptoms

STEPS = np.arange(10, 210, dtype=np.int64)


def noise(seed: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).normal(0.0, 0.05, STEPS.size)


def test_a_planted_step_is_found_where_it_is() -> None:
    found = changes.find(STEPS, noise(0) + 0.5 * (STEPS >= 110))
    assert found is not None
    assert found.at is not None
    assert abs(found.at - 110) <= 2
    assert found.step is not None
    assert abs(found.step.before) < 0.02


def test_a_straight_rise_is_a_trend_and_no_step() -> None:
    found = changes.find(STEPS, noise(1) + np.linspace(0, 1, STEPS.size))
    assert found is not None
    assert (found.trend, found.at) == ("rising", None)


def test_noise_has_neither_in_nineteen_of_twenty_runs() -> None:
    quiet = [changes.find(STEPS, noise(seed)) for seed in range(20)]
    assert sum(each is not None and each.trend == "flat" and each.at is None for each in quiet) >= 19


def test_too_few_values_say_nothing() -> None:
    assert changes.find(STEPS[:7], noise(0)[:7]) is None
    assert changes.find(STEPS, np.full(STEPS.size, np.nan)) is None


def test_missing_values_do_not_move_the_step() -> None:
    values = noise(2) + 0.5 * (STEPS >= 110)
    values[::7] = np.nan
    found = changes.find(STEPS, values)
    assert found is not None
    assert found.at is not None
    assert abs(found.at - 110) <= 3


def test_words_claim_no_cause() -> None:
    values = noise(0) + 0.5 * (STEPS >= 110)
    found = changes.find(STEPS, values)
    assert found is not None
    line = symptoms.section([symptoms.Signal("reward", "Reward", "", STEPS, values, True, "", change=found)])
    assert ">associated<" in line[line.index("change-point") :]
    assert "not caused by it" in line
