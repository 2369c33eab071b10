"""A correction cures where no gate of a symptom is left open."""

from __future__ import annotations

import numpy as np
import pytest

from mxprobe.attribution import Thresholds
from mxprobe.attribution.corrections import is_cured


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
