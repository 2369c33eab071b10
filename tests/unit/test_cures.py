"""Every gate of a symptom: what a correction must pass to cure, and what is said of the one that fired."""

from __future__ import annotations

import numpy as np
import pytest

from mxprobe.attribution import Thresholds
from mxprobe.attribution.correction_scores import is_cured
from mxprobe.attribution.symptom import Mismatch


@pytest.mark.parametrize(
    ("left", "share", "cured"),
    [
        ([0.001] * 8, None, True),
        ([0.01] * 4 + [0.001] * 4, None, False),  # the median
        ([0.01] * 2 + [0.001] * 6, None, False),  # a quarter of them
        ([0.01] + [0.001] * 7, None, True),
        ([0.2] + [0.001] * 7, None, False),  # one by much
        ([0.01] + [0.001] * 7, 0.1, False),
        ([0.01] + [0.001] * 15, 0.1, True),
        ([0.2] + [0.001] * 15, 0.1, False),
    ],
)
def test_every_gate_is_tested(left: list[float], share: float | None, cured: bool):
    assert is_cured(np.array(left), 0.002, share, Thresholds()) is cured


@pytest.mark.parametrize("n_over", range(9))
def test_what_a_quarter_reaches_is_over_the_gate_where_a_quarter_is(n_over: int):
    seen = Mismatch(np.array([0.01] * n_over + [0.001] * (8 - n_over) + [np.nan]), 0.0, 0.0, 8, 0)
    assert (seen.reached_by(0.25) > 0.002) == (seen.share_above(0.002) >= 0.25)


def test_nothing_seen_has_no_largest():
    nothing = Mismatch(np.full(3, np.nan), np.nan, np.nan, 0, 0)
    assert np.isnan([nothing.largest, nothing.reached_by(0.25)]).all()
