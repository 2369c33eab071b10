"""The part of the mismatch that rounding explains, on sums whose answer is written out, and what withholds it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mxprobe.attribution import Thresholds
from mxprobe.attribution.decision import Reason, decide
from mxprobe.attribution.explained import BOTH, NO_STEP, OTHERWISE, ExplainedMismatch, explained_mismatch
from mxprobe.attribution.measured import measure
from mxprobe.attribution.sentences import headline, what_would_change
from mxprobe.measuring.tokens.mismatch import Pairs, rollout_rows
from mxprobe.schema import Verdict
from mxprobe.trace import open_trace
from tests.synthetic import OUTLIERS, write_trace

STEPS = (10, 20, 30, 40)


def drawn(step: int, size: float) -> torch.Tensor:
    return size * torch.randn(500, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def rollouts(size: float) -> pd.DataFrame:
    rows = []
    for step in STEPS:
        d = drawn(step, size)
        rows += [
            {"step": step, "source": "generation", **row} for row in rollout_rows(Pairs(d - 2.0, d * 0.0 - 2.0, 5))
        ]
    return pd.DataFrame(rows)


def replays(size: float, steps: tuple[int, ...] = STEPS) -> pd.DataFrame:
    rows = []
    for step in steps:
        for arm, factor in (("q", 1.0), ("qstar", 9.0)):
            d = factor * drawn(step + 1, size)
            sums = {"n_tokens": float(len(d)), "sum_log_prob_shift2": float(d.square().sum())}
            rows.append({"step": step, "arm": arm, "format": "mxfp4", "rule": "rceil", **sums})
    return pd.DataFrame(rows)


def outputs(rollout: str = "mxfp4+rceil", train: str = "none", *, exact: bool = True) -> pd.DataFrame:
    rows = [("rollout", rollout, exact), ("train", train, True)]
    return pd.DataFrame([{"phase": p, "recipe_x": r, "recipe_w": r, "exact": e} for p, r, e in rows for _ in range(3)])


@pytest.mark.parametrize(("observed", "replayed"), [(0.3, 0.3), (0.6, 0.3), (0.3, 0.1)])
def test_the_share_is_that_of_the_mean_squares(observed: float, replayed: float):
    found = explained_mismatch(rollouts(observed), replays(replayed), outputs())
    means = [
        np.mean([float(drawn(step + shift, size).square().mean()) for step in STEPS])
        for shift, size in ((0, observed), (1, replayed))
    ]
    assert (found.observed, found.replayed) == pytest.approx(tuple(means))
    assert found.share == pytest.approx(means[1] / means[0])
    assert found.low < found.share < found.high
    assert (found.n_steps, found.withheld) == (4, "")


def test_steps_that_have_but_one_of_the_two_do_not_count():
    found = explained_mismatch(rollouts(0.3), replays(0.3, (30, 50)), outputs())
    assert (found.n_steps, found.low, found.high) == (1, -math.inf, math.inf)
    none = explained_mismatch(rollouts(0.3), replays(0.3, (50,)), outputs())
    assert none.withheld == NO_STEP
    assert math.isnan(none.share)


def test_what_withholds_it():
    either = rollouts(0.3), replays(0.3)
    assert explained_mismatch(*either, outputs("mxfp4+floor")).withheld == OTHERWISE
    assert explained_mismatch(*either, outputs("none")).withheld == OTHERWISE
    assert explained_mismatch(*either, outputs(train="mxfp4+rceil")).withheld == BOTH
    assert explained_mismatch(*either, outputs("mxfp4+floor", exact=False)).withheld == ""  # not known: the question
    assert explained_mismatch(rollouts(0.3).iloc[:0], replays(0.3), outputs()).withheld == NO_STEP


def test_a_mismatch_that_replays_do_not_show_is_not_explained_whatever_the_layers_say(tmp_path: Path):
    measured, thresholds = measure(open_trace(write_trace(tmp_path / "t", OUTLIERS))), Thresholds()
    assert measured.explained is None
    weights = np.ones(measured.n_clusters)

    def judged(share: float, high: float, withheld: str = "") -> tuple[Verdict, Reason]:
        found = ExplainedMismatch(share, 2 * share - high, high, 1.0, share, 3, withheld)
        decision = decide(replace(measured, explained=found), weights, thresholds)
        return decision.verdict, decision.reason

    without = decide(measured, weights, thresholds)
    assert without.verdict is Verdict.ENABLE
    assert judged(0.1, 0.3) == (Verdict.NOT_EXPLAINED, Reason.REPLAYED)
    for spared in (judged(0.1, 0.6), judged(0.9, 1.1), judged(0.1, math.inf), judged(math.nan, math.nan, OTHERWISE)):
        assert spared == (without.verdict, without.reason)
    small = replace(measured, explained=ExplainedMismatch(0.1, 0.0, 0.2, 1.0, 0.1, 3))
    decision = decide(small, weights, thresholds)
    assert decision.chosen == ()
    assert "show 10 % of the disagreement" in headline(decision, small, thresholds)
    assert "key-value cache" in what_would_change(decision, small, thresholds)
