"""When a logged mismatch has jumped."""

from __future__ import annotations

import math

from mxprobe.attach.mismatch_watch import MIN_PAST, MismatchWatch


def see(watch: MismatchWatch, *values: float, metric: str = "mismatch_kl", key: str = "sampling/kl") -> str:
    n = len(values)
    return watch.see(
        {
            "source": ["trl"] * n,
            "raw_key": [key] * n,
            "metric": [metric] * n,
            "value": list(values),
            "step": list(range(n)),
        }
    )


def test_a_jump_is_one_against_the_median() -> None:
    watch = MismatchWatch()
    assert see(watch, *[0.010 + 0.001 * i for i in range(MIN_PAST)]) == ""
    assert see(watch, 0.06) == ""
    assert see(watch, 0.09) == "mismatch jump: sampling/kl 0.09 at step 0, its median 0.014"


def test_what_is_no_jump() -> None:
    watch = MismatchWatch()
    assert see(watch, *[0.01] * (MIN_PAST - 1), 9.0) == "", "too little of a past"
    assert see(watch, *[0.01] * 20, 9.0, metric="reward_mean", key="reward") == ""
    assert see(watch, *[1e-7] * 20, 9e-5, key="tiny") == "", "below what matters"
    assert see(watch, *[0.01] * 20, math.nan, key="nan") == ""
    assert see(watch, 9.0, key="another") == "", "each key has a past of its own"
