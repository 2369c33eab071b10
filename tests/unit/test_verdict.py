"""The verdict engine on traces of real tensors, with the answer known from how the run was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mxprobe.attribution import Certainty, Recommendation, Thresholds, recommend
from mxprobe.attribution.component import kind_of, name_component
from mxprobe.attribution.measured import MAX_CLUSTERS, correction_of, measure
from mxprobe.attribution.symptom import mismatch
from mxprobe.errors import UsageError
from mxprobe.schema import Component, Phase, Role, Verdict
from mxprobe.trace import TraceWriter, open_trace
from tests import synthetic
from tests.synthetic import HEALTHY, HIGH_PRECISION, OUTLIERS, STALE_WEIGHTS, Run, write_trace

FED_BY_NORM = set(synthetic.FED_BY_NORM)
QUICK = Thresholds().replace(n_resamples=20)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Path]:
    """The trace of a run, made once per module."""
    known: dict[Run, Path] = {}

    def record(run: Run) -> Path:
        if run not in known:
            known[run] = write_trace(tmp_path_factory.mktemp("trace") / "run.mxprobe", run)
        return known[run]

    return record


@pytest.fixture(scope="module")
def judge(recorded: Callable[[Run], Path]) -> Callable[..., Recommendation]:
    def recommended(run: Run, thresholds: Thresholds = QUICK) -> Recommendation:
        return recommend(open_trace(recorded(run)), thresholds)

    return recommended


def _columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    """A frame's rows as the writer takes them: absent values are None, histograms left out."""
    names = [name for name in frame.columns if name not in ("rank", "delta_hist", "code_hist")]
    return {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in names}


def evidence(recommendation: Recommendation, name: str):
    return next(item for item in recommendation.evidence if item.name == name)


@pytest.mark.parametrize("seed", [0, 1])
def test_outliers_are_a_deadzone_in_the_inputs_behind_the_norms(
    judge: Callable[..., Recommendation], seed: int
) -> None:
    answer = judge(replace(OUTLIERS, seed=seed))
    assert answer.verdict is Verdict.ENABLE
    assert answer.component is Component.DEADZONE
    assert {(group.role, group.module_kind) for group in answer.where} == {(Role.X_FWD, kind) for kind in FED_BY_NORM}
    assert all(len(group.modules) == 1 for group in answer.where)
    assert answer.chosen[0] in ("of:0.5", "of:1.0")
    best = answer.corrections[0]
    assert best.correction == answer.chosen[0]
    assert best.gain_low < best.gain < best.gain_high
    assert best.held_out_gain == pytest.approx(best.gain, abs=0.05)
    assert best.recovery > 0.5
    assert answer.agreement.value == 1.0
    assert answer.agreement.n == OUTLIERS.steps
    assert "alpha" in answer.headline
    assert all(kind in answer.headline for kind in FED_BY_NORM)


def test_corrections_that_do_not_mend_the_deadzone_are_not_named(judge: Callable[..., Recommendation]) -> None:
    scores = {score.correction: score for score in judge(OUTLIERS).corrections}
    assert not scores["mbs:128"].is_eligible
    assert not scores["rule:floor"].is_eligible
    assert scores["of:0.5"].gain == pytest.approx(0.75, abs=0.02)
    assert scores["nvfp4"].tier == 2
    assert scores["of:1.0"].tensor_recovery == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_alike_on_both_sides_needs_nothing(judge: Callable[..., Recommendation], seed: int) -> None:
    answer = judge(replace(HEALTHY, seed=seed))
    assert answer.verdict is Verdict.NONE_NEEDED
    assert answer.chosen == ()
    assert answer.snippet is None
    assert answer.corrections  # what-ifs stay listed
    assert all(score.cures is None for score in answer.corrections)


def test_alike_and_with_outliers_is_on_policy_whatever_the_error(judge: Callable[..., Recommendation]) -> None:
    """Both sides make a large error by the same function: on-policy, and no symptom."""
    answer = judge(Run(train="mxfp4+rceil", outlier_gain=32.0))
    assert answer.verdict is Verdict.NONE_NEEDED
    assert evidence(answer, "realised_error_rollout").value > 0.1
    assert "Both carry rounding" in answer.headline


@pytest.mark.parametrize("seed", [0, 1])
def test_stale_weights_are_not_explained(judge: Callable[..., Recommendation], seed: int) -> None:
    answer = judge(replace(STALE_WEIGHTS, seed=seed))
    assert answer.verdict is Verdict.NOT_EXPLAINED
    assert answer.chosen == ()
    assert answer.corrections == ()
    assert answer.component is Component.NONE
    assert evidence(answer, "realised_over_predicted_rollout").holds is True
    assert "stale or wrong weights" in answer.what_would_change
    assert evidence(answer, "mismatch_of_far").holds is ("of the mismatch made by" in answer.what_would_change)


def test_high_precision_gets_the_what_if_answer(judge: Callable[..., Recommendation]) -> None:
    answer = judge(replace(HIGH_PRECISION, outlier_gain=32.0))
    assert answer.verdict is Verdict.NOTHING_QUANTIZED
    assert answer.headline.startswith("Nothing is quantized here: outputs in ")
    assert "MXFP4 would" in answer.headline
    assert "deadzone" in answer.headline
    assert answer.chosen == ()
    assert evidence(answer, "component").certainty is Certainty.PREDICTED


def test_without_a_recognised_rollout_nothing_is_said_of_how_it_computes(tmp_path: Path) -> None:
    """Job `grpo_plain`: its rollout rounded by hand, and was not recognised."""
    run = replace(HIGH_PRECISION, rollout=None, outlier_gain=32.0)
    answer = recommend(open_trace(write_trace(tmp_path / "trainer", run, role="trainer")), QUICK)
    assert answer.verdict is Verdict.NOT_ENOUGH_EVIDENCE
    assert "no generation was recognised" in answer.headline
    assert "mxprobe.rollout(model)" in answer.what_would_change
    assert "--rollout-in" in answer.what_would_change
    assert evidence(answer, "generation").holds is False
    assert evidence(answer, "component").certainty is Certainty.PREDICTED
    assert answer.chosen == ()
    rank = write_trace(tmp_path / "rank", run, ranks=[{"rank": 1, "role": "trainer"}])
    assert recommend(open_trace(rank), QUICK).verdict is Verdict.NOT_ENOUGH_EVIDENCE
    seen = write_trace(tmp_path / "seen", replace(run, rollout="none"), role="trainer")
    assert recommend(open_trace(seen), QUICK).verdict is Verdict.NOTHING_QUANTIZED


def test_plain_mxfp4_rollout_is_grid_noise_everywhere(judge: Callable[..., Recommendation]) -> None:
    answer = judge(Run())
    assert answer.component is Component.GRID
    assert len(answer.where) == 2 * len(synthetic.KINDS)
    assert answer.chosen == ("of:1.0",)  # the cheapest that brings the mismatch under its gate
    cures = {score.correction: score.cures for score in answer.corrections}
    assert cures["of:1.0"] is True
    assert cures["of:0.5"] is False


def test_only_quantized_operands_are_blamed(tmp_path: Path, recorded: Callable[[Run], Path]) -> None:
    """Weight-only quantization: the inputs' larger error is not this run's problem."""
    directory = recorded(replace(OUTLIERS, rollout=None))
    rows = open_trace(directory).outputs()
    with TraceWriter(tmp_path / "other", {}) as writer:
        for phase, side in (("train", "none"), ("rollout", "mxfp4+rceil")):
            copy = rows.assign(phase=phase, recipe_x="none", recipe_w=side, exact=True)
            error = 0.0 if side == "none" else 0.013
            copy = copy.assign(realised2=copy["ref2"] * error, predicted2=copy["ref2"] * error)
            writer.append("outputs", _columns(copy))
        for table in ("tensors", "whatif", "modules"):
            frame = open_trace(directory).table(table)
            writer.append(table, _columns(frame))
    answer = recommend(open_trace(tmp_path / "other"), QUICK)
    assert answer.verdict is Verdict.ENABLE
    assert {group.role for group in answer.where} == {Role.W_FWD}


def test_a_correction_that_is_on_already_is_not_named_again(judge: Callable[..., Recommendation]) -> None:
    answer = judge(Run(outlier_gain=32.0, rollout="mxfp4+of:0.5"))
    scores = {score.correction: score for score in answer.corrections}
    assert scores["of:0.5"].is_active
    assert scores["of:0.5"].gain == pytest.approx(0.0, abs=1e-9)
    assert answer.chosen == ("of:1.0",)
    assert scores["mbs:128"].gain < 0  # against what the run does, it would do harm


def test_another_scale_rule_in_the_run_is_known_as_such(judge: Callable[..., Recommendation]) -> None:
    scores = {s.correction: s for s in judge(Run(rollout="mxfp4+floor", rule="floor")).corrections}
    assert scores["rule:floor"].is_active


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(steps=7), "7 probed steps, 8 are needed"),
        (Run(train="mxfp4+rceil", rollout=None), "only training was seen"),
        (replace(OUTLIERS, has_operands=False), "no operand statistics"),
    ],
)
def test_too_little_to_say(judge: Callable[..., Recommendation], run: Run, words: str) -> None:
    answer = judge(run)
    assert answer.verdict is Verdict.NOT_ENOUGH_EVIDENCE
    assert words in answer.headline
    assert answer.chosen == ()


def test_an_empty_trace_is_not_enough(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t", {}).close()
    answer = recommend(open_trace(tmp_path / "t"))
    assert answer.verdict is Verdict.NOT_ENOUGH_EVIDENCE
    assert answer.agreement.value is None
    assert any("empty" in caveat for caveat in answer.caveats)
    assert answer.coverage.flops_frac is None


def test_without_what_ifs_only_high_precision_is_left(judge: Callable[..., Recommendation]) -> None:
    answer = judge(replace(OUTLIERS, whatifs=()))
    assert answer.verdict is Verdict.KEEP_HIGH_PRECISION
    assert answer.chosen == ("keep_high_precision",)


def test_overlapping_gains_at_different_cost_are_undecided(tmp_path: Path, recorded: Callable[[Run], Path]) -> None:
    """Two corrections whose what-ifs are made to differ by less than the steps do."""
    directory = recorded(replace(OUTLIERS, whatifs=("of:0.5",)))
    trace = open_trace(directory)
    rng = np.random.default_rng(0)
    with TraceWriter(tmp_path / "other", {}) as writer:
        for table in ("tensors", "outputs", "whatif", "modules"):
            frame = trace.table(table)
            writer.append(table, _columns(frame))
            if table == "whatif":
                noise = rng.uniform(0.7, 1.3, len(frame))
                rival = frame.assign(
                    correction="had:32",
                    out_e2=frame["out_e2"] * noise,
                    out_zeroed2=frame["out_zeroed2"] * 1.2,
                )
                writer.append(table, _columns(rival))
    answer = recommend(open_trace(tmp_path / "other"), QUICK)
    assert answer.verdict is Verdict.UNDECIDED
    assert answer.chosen == ("of:0.5", "had:32")  # the larger recovery first
    assert "replay" in answer.what_would_change
    assert [score.correction for score in answer.corrections[:2]] == ["of:0.5", "had:32"]


def test_agreement_falls_where_the_steps_disagree(tmp_path: Path, recorded: Callable[[Run], Path]) -> None:
    """Half of the steps far from their prediction, half exact: resamples must not all end alike."""
    healthy = open_trace(recorded(replace(OUTLIERS, drift=0.0))).outputs()
    with TraceWriter(tmp_path / "b", {}) as writer:
        rollout = healthy["phase"] == "rollout"
        off = healthy["step"].isin([10, 20, 30]) & rollout
        rows = healthy.assign(realised2=healthy["realised2"].where(~off, healthy["realised2"] * 1.75))
        writer.append("outputs", _columns(rows))
    answer = recommend(open_trace(tmp_path / "b"), Thresholds().replace(n_resamples=100))
    assert answer.agreement.value is not None
    assert 0.2 < answer.agreement.value < 0.95


def test_thresholds_can_be_changed(judge: Callable[..., Recommendation]) -> None:
    run = Run()
    assert judge(run, QUICK.replace(mismatch=0.05)).verdict is Verdict.NONE_NEEDED
    with pytest.raises(UsageError, match="no threshold named mismach"):
        Thresholds().replace(mismach=1.0)
    assert Thresholds().replace(min_steps=4.0).min_steps == 4


def test_a_dead_writer_is_a_caveat(tmp_path: Path) -> None:
    import shutil

    write_trace(tmp_path / "a", HEALTHY, close=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    answer = recommend(open_trace(tmp_path / "b"), QUICK)
    assert answer.verdict is Verdict.NONE_NEEDED
    assert any("writer died" in caveat for caveat in answer.caveats)


def test_trends_are_never_more_than_associated(judge: Callable[..., Recommendation]) -> None:
    answer = judge(HEALTHY)
    trends = [item for item in answer.evidence if item.name.startswith("trend_")]
    assert {item.name for item in trends} == {"trend_reward_mean", "trend_entropy", "trend_grad_norm"}
    assert all(item.certainty is Certainty.ASSOCIATED and item.threshold is None for item in trends)


def test_coverage_is_a_share_of_flops(judge: Callable[..., Recommendation]) -> None:
    coverage = judge(HEALTHY).coverage
    assert coverage.flops_frac == pytest.approx(7 / 8)
    assert (coverage.n_probed, coverage.n_modules) == (7, 8)
    assert coverage.not_seen[0][0] == "lm_head"
    assert "fused head" in coverage.not_seen[0][1]


def test_many_steps_are_pooled_into_blocks(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        for step in range(200):
            for phase in ("train", "rollout"):
                writer.append(
                    "outputs",
                    {
                        "step": [step],
                        "module": ["a"],
                        "phase": [phase],
                        "ref2": [1.0],
                        "realised2": [0.1],
                        "predicted2": [0.1],
                        "exact": [True],
                        "recipe_x": ["mxfp4+rceil"],
                        "recipe_w": ["mxfp4+rceil"],
                    },
                )
    measured = measure(open_trace(tmp_path / "t"))
    assert measured.n_clusters == MAX_CLUSTERS
    assert measured.n_steps == 200
    assert measured.outputs[Phase.TRAIN].ref2.sum() == 200
    assert set(measured.outputs[Phase.TRAIN].ref2.ravel()) == {3.0, 4.0}
    assert recommend(open_trace(tmp_path / "t"), QUICK).agreement.n == 200


def test_mismatch_floor_is_the_change_between_steps(tmp_path: Path) -> None:
    """Training error alternates by 0.01 between steps: a difference of 0.02 to rollout is under 3 x the floor."""
    with TraceWriter(tmp_path / "t", {}) as writer:
        for step in range(10):
            for phase, error in (("train", 0.10 + 0.01 * (step % 2)), ("rollout", 0.125)):
                writer.append(
                    "outputs",
                    {
                        "step": [step],
                        "module": ["a"],
                        "phase": [phase],
                        "ref2": [1.0],
                        "realised2": [error],
                        "predicted2": [error],
                        "exact": [False],
                        "recipe_x": ["mxfp4+rceil"],
                        "recipe_w": ["mxfp4+rceil"],
                    },
                )
    measured = measure(open_trace(tmp_path / "t"))
    seen = mismatch(measured, np.ones(measured.n_clusters))
    assert seen.median == pytest.approx(0.02)
    assert seen.floor == pytest.approx(0.01)
    assert not seen.is_symptom(Thresholds())
    assert seen.is_symptom(Thresholds().replace(mismatch_floor_factor=1.0))


@pytest.mark.parametrize(
    ("shares", "component"),
    [
        ({"zeroed": 0.5, "saturated": 0.9, "scale": 0.9, "grid": 0.1}, Component.DEADZONE),
        ({"zeroed": 0.49, "saturated": 0.5, "scale": 0.9, "grid": 0.1}, Component.SATURATION),
        ({"zeroed": 0.4, "saturated": 0.0, "scale": 0.6, "grid": 0.3}, Component.SCALE),
        ({"zeroed": 0.1, "saturated": 0.0, "scale": -0.2, "grid": 1.1}, Component.GRID),
        ({"zeroed": 0.4, "saturated": 0.0, "scale": 0.45, "grid": 0.4}, Component.MIXED),
        (dict.fromkeys(("zeroed", "saturated", "scale", "grid"), float("nan")), Component.NONE),
    ],
)
def test_the_component_rule(shares: dict[str, float], component: Component) -> None:
    assert name_component(shares, Thresholds()) is component


@pytest.mark.parametrize(
    ("side", "correction"),
    [
        ("none", ""),
        ("", ""),
        ("mxfp4+rceil", "rule:rceil"),
        ("mxfp4+of:0.5", "of:0.5"),
        ("mxfp4+mbs:128", "mbs:128"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_recipes_as_corrections(side: str, correction: str) -> None:
    assert correction_of(side) == correction


@pytest.mark.parametrize(
    ("module", "kind"),
    [("model.layers.3.mlp.up_proj", "up_proj"), ("net.2", "net.2"), ("0", "0"), ("experts.7.down_proj", "down_proj")],
)
def test_kinds_of_modules(module: str, kind: str) -> None:
    assert kind_of(module) == kind


def test_one_layer_that_differs_is_named_where_log_probabilities_do(
    recorded: Callable[[Run], Path], tmp_path: Path
) -> None:
    """All Linears are MXFP4 on both sides, with a deadzone, but for one that the trainer keeps exact."""
    alike, exact = (
        open_trace(recorded(Run(train=train, outlier_gain=32.0, layers=2, whatifs=("of:1.0", "mxfp8"))))
        for train in ("mxfp4+rceil", "none")
    )
    name = "model.layers.1.self_attn.q_proj"
    rows, other = alike.table("outputs"), exact.table("outputs")
    outputs = pd.concat([rows[rows["module"] != name], other[other["module"] == name]], ignore_index=True)
    steps = sorted(outputs["step"].unique().tolist())
    n = [100] * len(steps)
    sums = {"sum_d": [0.0] * len(n), "sum_abs_d": [5.0] * len(n), "sum_k3": [0.2] * len(n), "sum_w": n, "sum_w2": n}
    with TraceWriter(tmp_path / "one.mxprobe", {"config": {"rule": "rceil"}}) as writer:
        writer.append("outputs", _columns(outputs))
        for table in ("tensors", "whatif"):
            writer.append(table, _columns(alike.table(table)))
        about = {"source": ["generation"] * len(n), "stratum": ["all"] * len(n), "dtype": ["float32"] * len(n)}
        writer.append("rollouts", {"step": steps, "n_tokens": n, **about, **sums})
    answer = recommend(open_trace(tmp_path / "one.mxprobe"), QUICK)
    assert answer.verdict is Verdict.ENABLE, answer.headline
    assert answer.component is Component.DEADZONE
    assert {module for group in answer.where for module in group.modules} == {name}
    assert "needs no mismatch of a Linear over" in answer.what_would_change
    assert {score.correction for score in answer.corrections if score.cures} >= {"of:1.0", "mxfp8"}
