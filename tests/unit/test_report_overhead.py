"""Cost of the probe: hooks in the training thread, measuring beside it, ranks added where they must be."""

import math

import pandas as pd
import pytest

from mxprobe_reports import overhead_card
from tests import report_frames


def test_hooks_are_related_to_the_rest_of_the_steps() -> None:
    cost = overhead_card.of(report_frames.overhead(240, 20), {})
    assert cost.hooks_frac == pytest.approx((12 * 0.320 + 228 * 20e-6) / (240 * 0.06 - 228 * 20e-6))
    assert math.isnan(cost.measuring_s)
    assert "beside it" not in overhead_card.section(cost)


def test_measuring_thread_is_shown_beside_the_hooks() -> None:
    run = {"agent": {"measure_ns": 3_000_000_000, "step_ns": 12_000_000_000}}
    page = overhead_card.section(overhead_card.of(report_frames.overhead(240, 20), run))
    assert "25.0 %" in page
    assert "26.7 %" in page


def test_losses_are_added_over_ranks_and_steps_are_those_of_one() -> None:
    one = report_frames.overhead(40, 20).assign(n_dropped=3)
    both = pd.concat([one, one.assign(rank=1, n_dropped=4)], ignore_index=True)
    cost = overhead_card.of(both, {})
    assert cost.step_s.size == 40
    assert cost.n_dropped == 7
    assert cost.sent_bytes == 2 * 40_000


def test_first_and_last_step_have_no_neighbour() -> None:
    page = overhead_card.section(overhead_card.of(report_frames.overhead(1, 1), {}))
    assert "step just after a probed one, median</dt><dd>–" in page


def test_no_step_timed_is_said() -> None:
    assert "No step was timed" in overhead_card.section(overhead_card.of(report_frames.frame("overhead", {}), {}))


def test_a_replay_is_related_to_200_steps_and_booked_on_the_step_after_it() -> None:
    frame = report_frames.overhead(240, 20)
    frame.loc[frame["step"].isin([26, 146]), ["step_ns", "probe_ns"]] = [300_000_000, 240_000_000]
    frame.loc[frame["step"] == 66, ["step_ns", "probe_ns"]] = [6_060_000_000, 6_000_000_000]
    cost = overhead_card.of(frame, {}, sensitivity=[25, 65, 145], replays=[65])
    assert cost.replay_s == pytest.approx({"sensitivity": 0.24, "other roundings": 6.0})
    rest = 200 * (0.06 - 20e-6)
    assert cost.of_period(0.24) == pytest.approx(0.24 / rest, rel=1e-6)
    assert cost.default_frac == pytest.approx((4 * 0.32 + 196 * 20e-6 + 0.24) / rest, rel=1e-6)
    page = overhead_card.section(cost)
    assert "a replay for sensitivity, median</dt><dd>240 ms, 2.0 % of 200 steps" in page
    assert "default schedule, in our hooks</dt><dd>12.7 % of 200 steps" in page
    nothing = overhead_card.section(overhead_card.of(report_frames.overhead(240, 20), {}))
    assert "replay" not in nothing
    assert "default schedule" not in nothing


def test_what_the_agent_says_of_kernels_and_memory_is_shown():
    agent = {"kernels": "ready after 2.0 s", "memory": "copies of 1.0 MB at once at most", "device_steps": ""}
    cost = overhead_card.of(report_frames.overhead(1, 1), {"agent": agent})
    assert [name for name, _ in cost.told] == ["kernels", "memory of the device"]
    page = overhead_card.section(overhead_card.of(report_frames.overhead(240, 20), {"agent": agent}))
    assert "copies of 1.0 MB at once at most" in page
