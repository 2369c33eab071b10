"""What the demo predicts of its second run, and how it judges what came."""

import math
from pathlib import Path

import pytest

from mxprobe.demo.second_run import DOWN, UP, Outcome, Replay, mismatch_of, predict
from mxprobe.trace import TraceWriter, open_trace

FIRST = Replay(plain=(0.8, 1.0, 1.2), corrected=(0.08, 0.10, 0.12))


def test_kl_is_predicted_by_the_replay_and_mismatch_by_its_ratio() -> None:
    kl, mismatch = predict(FIRST, Replay((0.5,) * 3, (0.2,) * 3), (2.0, 0.1))
    assert (kl.before, kl.predicted, kl.after) == pytest.approx((1.0, 0.1, 0.2))
    assert (mismatch.before, mismatch.predicted, mismatch.after) == pytest.approx((2.0, 0.2, 0.1))
    # The ratio is the same in each batch: only the other weights are left to be uncertain about.
    assert (mismatch.low, mismatch.high) == pytest.approx((0.2 / DOWN, 0.2 * UP))
    half_width = 4.303 * 0.02 / math.sqrt(3) / 0.1  # t, 2 degrees of freedom
    assert kl.high == pytest.approx(0.1 * UP * (1 + half_width), rel=1e-3)
    assert kl.low == pytest.approx(0.1 / DOWN / (1 + half_width), rel=1e-3)


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (0.1, Outcome.AS_PREDICTED),
        (0.001, Outcome.FURTHER),
        (0.99, Outcome.LESS),
        (1.0, Outcome.NOT),
        (3.0, Outcome.NOT),
    ],
)
def test_what_came_is_judged_by_the_interval(after: float, moved: Outcome) -> None:
    flat = Replay((1.0, 1.0), (0.1, 0.1))
    assert predict(flat, Replay((1.0, 1.0), (after, after)), (1.0, after))[0].outcome is moved


def test_rising_is_never_as_predicted_however_wide_the_interval() -> None:
    small = Replay((1.0, 1.0), (0.9, 0.9))
    kl, mismatch = predict(small, Replay((1.0, 1.0), (1.1, 1.1)), (1.0, 1.1))
    assert kl.high > 1.1
    assert kl.outcome is mismatch.outcome is Outcome.NOT


def test_mismatch_is_k3_over_the_last_half_of_the_probed_steps(tmp_path: Path) -> None:
    steps, k3 = [10, 20, 30, 40, 10], [50.0, 50.0, 3.0, 5.0, 99.0]
    rows = {
        "step": steps,
        "time_ns": steps,
        "stratum": ["all"] * 4 + ["entropy_q1"],
        "n_tokens": [100] * 5,
        "sum_k3": k3,
    }
    with TraceWriter(tmp_path / "t", {}) as writer:
        writer.append("rollouts", rows)
    assert mismatch_of(open_trace(tmp_path / "t")) == pytest.approx(8.0 / 200)
    with TraceWriter(tmp_path / "empty", {}):
        pass
    assert math.isnan(mismatch_of(open_trace(tmp_path / "empty")))
