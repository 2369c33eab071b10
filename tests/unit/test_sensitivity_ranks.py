"""From rows of `sensitivity` to an order of operands with intervals, and its validity against replays."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mxprobe.attribution.sensitivity_ranks import operand_sensitivity, validity


def rows(delta2: dict[str, list[float]], *, n_tokens: float = 100.0) -> pd.DataFrame:
    """One x_fwd operand per module, one value of Delta2 per microbatch."""
    return pd.DataFrame(
        [
            {
                "step": 10 * i,
                "micro_step": 0,
                "module": module,
                "role": "x_fwd",
                "component": component,
                "probe": 0,
                "n_tokens": n_tokens,
                "n_samples": 8,
                "sum_delta2": value * n_tokens * (1.0 if component == "total" else 0.5),
                "sum_log_prob_shift": -0.1 * n_tokens,
                "sum_entropy_shift": 0.2 * n_tokens,
                "rank": 0,
            }
            for module, values in delta2.items()
            for i, value in enumerate(values)
            for component in ("total", "grid")
        ]
    )


def test_means_over_microbatches_in_order():
    found = operand_sensitivity(rows({"a": [1.0, 3.0], "b": [10.0, 14.0]}))
    assert found["module"].tolist() == ["b", "a"]
    assert found["delta2"].tolist() == pytest.approx([12.0, 2.0])
    assert found["predicted_kl"].tolist() == pytest.approx([6.0, 1.0])
    assert found["log_prob_shift"].tolist() == pytest.approx([-0.1, -0.1])
    assert found["entropy_shift"].tolist() == pytest.approx([0.2, 0.2])
    assert found["n_microbatches"].tolist() == [2, 2]
    grid = operand_sensitivity(rows({"a": [1.0, 3.0], "b": [10.0, 14.0]}), component="grid")
    assert grid["delta2"].tolist() == pytest.approx([6.0, 1.0])


def test_microbatches_weigh_by_their_tokens():
    small, large = rows({"a": [4.0]}, n_tokens=100.0), rows({"a": [1.0]}, n_tokens=300.0).assign(step=99)
    assert operand_sensitivity(pd.concat([small, large]))["delta2"].tolist() == pytest.approx([1.75])


def test_rank_intervals_are_tight_where_operands_differ_and_wide_where_not():
    rng = np.random.default_rng(0)
    noise = rng.lognormal(0.0, 0.6, size=(3, 12))
    found = operand_sensitivity(
        rows({"far": list(100 * noise[0]), "like": list(1.0 * noise[1]), "unlike": list(1.02 * noise[2])})
    ).set_index("module")
    assert (found.loc["far", "rank_low"], found.loc["far", "rank_high"]) == (1, 1)
    for module in ("like", "unlike"):
        assert (found.loc[module, "rank_low"], found.loc[module, "rank_high"]) == (2, 3)


def test_one_microbatch_has_ranks_without_intervals_and_none_has_nothing():
    found = operand_sensitivity(rows({"a": [1.0], "b": [2.0]}))
    assert found["rank"].tolist() == [1, 2]
    assert found[["rank_low", "rank_high"]].isna().all(axis=None)
    assert operand_sensitivity(rows({"a": [1.0]}).iloc[:0]).empty


def test_operands_measured_in_turn_are_ranked_together():
    found = operand_sensitivity(
        pd.concat([rows({"a": [1.0, 1.0], "b": [2.0, 2.0]}), rows({"c": [5.0, 5.0]}).assign(step=[7, 7, 8, 8])])
    )
    assert found["module"].tolist() == ["c", "b", "a"]


def test_prediction_is_held_against_the_replay():
    replays = pd.DataFrame({"step": [0, 10], "arm": ["q", "q"], "sum_kl": [3.0, 60.0], "n_tokens": [100.0, 100.0]})
    found = validity(rows({"a": [0.02, 0.02], "b": [0.04, 0.04]}), replays)
    assert found["predicted_kl"].tolist() == pytest.approx([0.03, 0.03])
    assert found["ratio"].tolist() == pytest.approx([1.0, 0.05])
    assert found["is_valid"].tolist() == [True, False]


def test_rows_that_add_up_old_steps_count_as_many_and_meet_the_replays_of_all():
    window = rows({"a": [0.02], "b": [0.04]}).assign(n_steps=3, last_step=20)
    later = rows({"a": [0.02], "b": [0.04]}).assign(step=40, n_steps=1, last_step=40)
    thinned = pd.concat([window, later])
    assert operand_sensitivity(thinned)["n_microbatches"].tolist() == [4, 4]
    steps = [0, 10, 20, 30, 40]
    replays = pd.DataFrame({"step": steps, "arm": "q", "sum_kl": [1.0, 3.0, 5.0, 99.0, 6.0], "n_tokens": 100.0})
    found = validity(thinned, replays)
    assert found["step"].tolist() == [0, 40]
    assert found["replayed_kl"].tolist() == pytest.approx([0.03, 0.06])
