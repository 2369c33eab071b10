"""Log-probabilities and weight lags in the verdict: what each does to the gates, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mxprobe.attribution import Thresholds, recommend
from mxprobe.attribution.decision import Decision, Reason, decide
from mxprobe.attribution.measured import Measured, measure
from mxprobe.attribution.sentences import headline, what_would_change
from mxprobe.attribution.token_mismatch import SUMS, Behind, LogProbs, Sides, behind_words, log_probs_of, modules_behind
from mxprobe.schema import Verdict
from mxprobe.trace import TraceWriter, open_trace
from tests.synthetic import HEALTHY, OUTLIERS, write_trace

QUICK = Thresholds().replace(n_resamples=10)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("traces")
    runs = {"healthy": HEALTHY, "outliers": OUTLIERS}
    return {name: write_trace(directory / f"{name}.mxprobe", run) for name, run in runs.items()}


def log_probs(n_clusters: int, d: float, *, spread: float = 0.0, dtype: str = "float32") -> LogProbs:
    """Each cluster has 100 tokens, half at d + spread and half at d - spread."""
    ds = np.array([d + spread, d - spread]).repeat(50)
    w = np.exp(-ds)
    sums = {
        "n_tokens": 100.0,
        "sum_d": ds.sum(),
        "sum_abs_d": np.abs(ds).sum(),
        "sum_k3": (w - 1 + ds).sum(),
        "sum_w": w.sum(),
        "sum_w2": (w**2).sum(),
    }
    return LogProbs({name: np.full(n_clusters, float(value)) for name, value in sums.items()}, dtype)


def judged(path: Path, sides: Sides) -> tuple[Decision, Measured]:
    measured = replace(measure(open_trace(path)), sides=sides)
    return decide(measured, np.ones(measured.n_clusters), QUICK, with_whatifs=False), measured


def n_clusters(path: Path) -> int:
    return measure(open_trace(path)).n_clusters


def test_sums_of_identical_policies_are_no_symptom():
    same = log_probs(4, 0.0)
    weights = np.ones(4)
    assert (same.abs_d(weights), same.kl(weights), same.ess_loss(weights)) == (0.0, 0.0, 0.0)
    assert not same.is_symptom(weights, QUICK)


def test_the_gate_is_three_times_the_floor_of_the_dtype():
    weights = np.ones(4)
    assert log_probs(4, 0.004).is_symptom(weights, QUICK)
    assert not log_probs(4, 0.002).is_symptom(weights, QUICK)
    assert not log_probs(4, 0.04, dtype="bfloat16").is_symptom(weights, QUICK)
    assert log_probs(4, 0.07, dtype="bfloat16").is_symptom(weights, QUICK)


def test_a_lost_effective_sample_size_is_a_symptom_by_itself():
    """At d = +-s half and half, w = e^-+s: ESS = (cosh s)^2 / cosh 2s, 0.900 at s = 0.346."""
    weights = np.ones(4)
    under, over = (log_probs(4, 0.0, spread=s, dtype="bfloat16") for s in (0.32, 0.37))
    lenient = QUICK.replace(mismatch_floor_factor=100.0)
    assert under.ess_loss(weights) == pytest.approx(1 - np.cosh(0.32) ** 2 / np.cosh(0.64))
    assert not under.is_symptom(weights, lenient)
    assert over.is_symptom(weights, lenient)


def test_with_log_probabilities_the_layers_alone_make_no_symptom(traces: dict[str, Path]):
    n = n_clusters(traces["outliers"])
    assert judged(traces["outliers"], Sides())[0].verdict is Verdict.ENABLE
    assert judged(traces["outliers"], Sides(log_probs(n, 0.5)))[0].verdict is Verdict.ENABLE
    decision, measured = judged(traces["outliers"], Sides(log_probs(n, 1e-4)))
    assert decision.verdict is Verdict.NONE_NEEDED
    assert "|log-probability difference| above 0.003 nats (now 1.0×10⁻⁴)" in what_would_change(
        decision, measured, QUICK
    )


def test_equal_layers_and_unequal_probabilities_are_not_explained(traces: dict[str, Path]):
    n = n_clusters(traces["healthy"])
    assert judged(traces["healthy"], Sides(log_probs(n, 1e-6)))[0].verdict is Verdict.NONE_NEEDED
    decision, measured = judged(traces["healthy"], Sides(log_probs(n, 0.4)))
    assert (decision.verdict, decision.reason) == (Verdict.NOT_EXPLAINED, Reason.ELSEWHERE)
    assert "the layers that were seen compute the same" in headline(decision, measured, QUICK)
    assert decision.scores == ()


BEHIND = (Behind("model.layers.0.self_attn.q_proj", 7, 43),)


def test_stale_weights_with_a_symptom_are_not_explained_and_named(traces: dict[str, Path]):
    n = n_clusters(traces["outliers"])
    decision, measured = judged(traces["outliers"], Sides(log_probs(n, 0.4), BEHIND))
    assert (decision.verdict, decision.reason) == (Verdict.NOT_EXPLAINED, Reason.BEHIND)
    said = headline(decision, measured, QUICK)
    assert "model.layers.0.self_attn.q_proj computes with the weights of step 43, 7 steps behind" in said
    assert decision.chosen == ()


def test_stale_weights_without_a_symptom_are_evidence_only(traces: dict[str, Path]):
    n = n_clusters(traces["healthy"])
    assert judged(traces["healthy"], Sides(log_probs(n, 1e-6), BEHIND))[0].verdict is Verdict.NONE_NEEDED


def outputs(lags: list[int | None], module: str = "up", phase: str = "rollout") -> pd.DataFrame:
    steps = [10 * (i + 1) for i in range(len(lags))]
    return pd.DataFrame({"step": steps, "module": module, "phase": phase, "weight_lag": pd.array(lags, "Int64")})


def test_a_module_is_behind_when_most_of_its_known_rollouts_are():
    assert modules_behind(outputs([0, 3, 3, None])) == (Behind("up", 3, 27),)
    assert modules_behind(outputs([0, 0, 3])) == ()
    assert modules_behind(outputs([None, None])) == ()
    assert modules_behind(outputs([5, 5], phase="train")) == ()


def test_old_steps_that_were_added_up_count_as_many_for_lag():
    thinned = outputs([0, 3]).assign(step=[10, 10], n_steps=[4, 6], last_step=[90, 100])
    assert modules_behind(thinned) == (Behind("up", 3, 97),)
    assert modules_behind(thinned.assign(n_steps=[6, 4])) == ()


def test_log_probabilities_of_all_steps_of_a_window_are_seen():
    steps, last = np.array([10, 50]), np.array([40, 50])
    rows = pd.DataFrame({"step": [10, 20, 40, 45, 50], "stratum": "all", "dtype": "float32", "source": "generation"})
    found = log_probs_of(rows.assign(**dict.fromkeys(SUMS, 1.0)), steps, last, 2)
    assert found is not None
    assert found.sums["n_tokens"].tolist() == [3.0, 1.0]


def test_many_modules_are_counted_and_few_are_named():
    few = [Behind(name, 3, 27) for name in ("q", "k")]
    assert behind_words(few) == "q and k compute with the weights of step 27, 3 steps behind the trainer"
    many = [Behind(str(i), i + 1, 30 - i) for i in range(6)]
    assert behind_words(many) == "6 modules compute with the weights of steps 25 to 30, 1 to 6 steps behind the trainer"


def test_a_trace_carries_both_into_the_recommendation(tmp_path: Path):
    steps = [10 * (i + 1) for i in range(8)]
    directory = write_trace(tmp_path / "run.mxprobe", OUTLIERS, close=False)
    writer_rows = {
        "step": steps,
        "time_ns": steps,
        "stratum": ["all"] * 8,
        "temperature": [1.0] * 8,
        "dtype": ["float32"] * 8,
        "n_tokens": [100] * 8,
        "sum_d": [40.0] * 8,
        "sum_abs_d": [50.0] * 8,
        "sum_k3": [12.0] * 8,
        "sum_w": [80.0] * 8,
        "sum_w2": [100.0] * 8,
    }
    other = TraceWriter(tmp_path / "tokens.mxprobe", {})
    other.append("rollouts", writer_rows)
    other.close()
    (tmp_path / "tokens.mxprobe" / "rollouts").rename(directory / "rollouts")
    answer = recommend(open_trace(directory), QUICK)
    said = {item.name: item for item in answer.evidence}
    assert said["log_prob_mismatch"].value == pytest.approx(0.5)
    assert said["log_prob_mismatch"].holds
    assert said["effective_sample_size"].value == pytest.approx(1 - 80.0**2 / 100.0 / 100.0)
    assert "weight_lag" not in said
    assert answer.verdict is Verdict.ENABLE
