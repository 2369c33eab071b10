"""Cost of the probe: hooks in the training thread, measuring beside it, ranks added where they must be."""

import math

import pandas as pd
import pytest

from mxprobe_reports import overhead
from tests import report_frames


def test_hooks_are_related_to_the_rest_of_the_steps() -> None:
    cost = overhead.of(report_frames.overhead(240, 20), {})
    assert cost.hooks_frac == pytest.approx((12 * 0.320 + 228 * 20e-6) / (240 * 0.06 - 228 * 20e-6))
    assert math.isnan(cost.measuring_s)
    assert "beside it" not in overhead.section(cost)


def test_measuring_thread_is_shown_beside_the_hooks() -> None:
    run = {"agent": {"measure_ns": 3_000_000_000, "step_ns": 12_000_000_000}}
    page = overhead.section(overhead.of(report_frames.overhead(240, 20), run))
    assert "25.0 %" in page
    assert "26.7 %" in page


def test_losses_are_added_over_ranks_and_steps_are_those_of_one() -> None:
    one = report_frames.overhead(40, 20).assign(n_dropped=3)
    both = pd.concat([one, one.assign(rank=1, n_dropped=4)], ignore_index=True)
    cost = overhead.of(both, {})
    assert cost.step_s.size == 40
    assert cost.n_dropped == 7
    assert cost.sent_bytes == 2 * 40_000


def test_first_and_last_step_have_no_neighbour() -> None:
    page = overhead.section(overhead.of(report_frames.overhead(1, 1), {}))
    assert "step just after a probed one, median</dt><dd>–" in page


def test_no_step_timed_is_said() -> None:
    assert "No step was timed" in overhead.section(overhead.of(report_frames.frame("overhead", {}), {}))
