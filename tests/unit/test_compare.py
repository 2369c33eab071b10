"""B relative to A: changes are found, predictions held against what happened, what cannot be compared is refused."""

import io
import json
import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from rich.console import Console

from mxprobe.cli import main
from mxprobe.cli.compare import show
from mxprobe.comparison import Comparison, Outcome, compare
from mxprobe.comparison.levels import ratio_of_levels
from mxprobe.errors import UsageError
from mxprobe.schema import Verdict
from mxprobe.trace import open_trace
from tests import report_frames
from tests.trace_files import frames, write_trace

Change = Callable[[dict[str, pd.DataFrame]], None]


def recipe(name: str, left: float) -> Change:
    """B's rollout runs another recipe and has `left` of A's realised error; steps vary by some percent."""

    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["outputs"]
        rollout = (rows["phase"] == "rollout").to_numpy()
        noise = np.random.default_rng(3).uniform(0.95, 1.05, len(rows))
        for column in ("realised2", "predicted2"):
            rows[column] = np.where(rollout, rows[column] * left * noise, rows[column])
        for column in ("recipe_x", "recipe_w"):
            rows[column] = np.where(rollout, name, rows[column].astype(str))

    return change


def signal(metric: str, add: float) -> Change:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["signals"]
        noise = np.random.default_rng(4).normal(0, 0.01, len(rows))
        rows["value"] += np.where(rows["metric"] == metric, add + noise, 0.0)

    return change


def run(directory: Path, *changes: Change, **facts: Any) -> Path:
    tables = frames()
    for change in changes:
        change(tables)
    return write_trace(directory, tables, run={**report_frames.inputs(1).run, **facts})


@cache
def first_run() -> Path:
    """A, the same for all tests."""
    return run(Path(tempfile.mkdtemp()) / "a.mxprobe")


def compared(tmp_path: Path, *changes: Change, **facts: Any) -> Comparison:
    return compare(open_trace(first_run()), open_trace(run(tmp_path / "b.mxprobe", *changes, **facts)))


def test_a_correction_that_does_what_was_predicted(tmp_path: Path) -> None:
    """report_frames' what-if of outlier fallback leaves .25 of every operand's error."""
    found = compared(tmp_path, recipe("mxfp4+of:0.5", 0.25), signal("reward_mean", 0.4))
    check = found.prediction
    assert check.verdict is Verdict.ENABLE
    assert check.outcome is Outcome.AS_PREDICTED
    assert (check.correction, check.named) == ("of:0.5", ("of:0.5",))
    assert check.n_on == check.n_operands > 0
    assert check.predicted is not None
    assert check.measured is not None
    assert check.predicted.value == pytest.approx(0.75, abs=1e-6)
    assert check.measured.low < 0.75 < check.measured.high
    assert found.headline.startswith("Outlier fallback (alpha 0.5) helped as predicted.")
    assert "The reward rose by 0.4" in found.headline
    assert found.symptom is not None
    assert found.symptom.b == pytest.approx(found.symptom.a / 4, rel=0.05)


@pytest.mark.parametrize(
    ("name", "left", "outcome"),
    [
        ("mxfp4+of:0.5", 0.6, Outcome.LESS),
        ("mxfp4+of:0.5", 0.05, Outcome.MORE),
        ("mxfp4+of:0.5", 1.0, Outcome.NOT_HELPED),
        ("mxfp4+of:0.5", 1.5, Outcome.NOT_HELPED),
        ("mxfp4+mbs:128", 0.85, Outcome.AS_PREDICTED),
        ("mxfp4+rceil", 0.3, Outcome.NOT_SWITCHED_ON),
        ("mxfp4+of:0.7", 0.1, Outcome.NOT_PREDICTED),
        ("none", 0.0, Outcome.AS_PREDICTED),
    ],
)
def test_outcomes(tmp_path: Path, name: str, left: float, outcome: Outcome) -> None:
    check = compared(tmp_path, recipe(name, left)).prediction
    assert check.outcome is outcome
    assert ("which A's verdict did not name" in check.text) == (name in ("mxfp4+mbs:128", "none"))


def test_a_best_fit_that_is_not_exact_is_no_correction(tmp_path: Path) -> None:
    """Stale or wrong weights: some recipe always fits best, and says nothing."""

    def inexact(tables: dict[str, pd.DataFrame]) -> None:
        recipe("mxfp4+ceil", 1.5)(tables)
        tables["outputs"]["exact"] = tables["outputs"]["phase"] != "rollout"

    check = compared(tmp_path, inexact).prediction
    assert check.outcome is Outcome.NOT_SWITCHED_ON
    assert "no known recipe reproduces B's outputs" in check.text


def test_what_changes_in_the_other_phase_is_no_correction(tmp_path: Path) -> None:
    """A trains in MXFP4, too; B trains in high precision, its rollout is as before."""

    def train_in_mxfp4(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["outputs"]
        train = (rows["phase"] == "train").to_numpy()
        for column in ("recipe_x", "recipe_w"):
            rows[column] = np.where(train, "mxfp4+rceil", rows[column].astype(str))
        for column in ("realised2", "predicted2"):
            rows[column] = np.where(train, 0.25 * rows["ref2"], rows[column])

    a = open_trace(run(tmp_path / "a.mxprobe", train_in_mxfp4))
    assert compare(a, open_trace(first_run())).prediction.outcome is Outcome.NOT_SWITCHED_ON


def test_going_back_to_the_plain_quantizer_is_no_correction(tmp_path: Path) -> None:
    a = open_trace(run(tmp_path / "a.mxprobe", recipe("mxfp4+of:0.5", 0.25)))
    found = compare(a, open_trace(first_run()))
    assert found.prediction.outcome is Outcome.NOT_SWITCHED_ON
    assert ("recipe in rollout", "mxfp4+of:0.5 in 7", "mxfp4+rceil in 7") in {
        (change.name, change.a, change.b) for change in found.config
    }


def test_half_of_the_modules_corrected_is_predicted_as_such(tmp_path: Path) -> None:
    """B has it on in the attention alone; the prediction is put together from what is on, not from the whole."""

    def attention_only(tables: dict[str, pd.DataFrame]) -> None:
        before = tables["outputs"].copy()
        recipe("mxfp4+of:0.5", 0.25)(tables)
        mlp = before["module"].astype(str).str.contains("mlp").to_numpy()
        for column in ("realised2", "predicted2", "recipe_x", "recipe_w"):
            kept = before[column].astype(str) if column.startswith("recipe") else before[column]
            tables["outputs"][column] = np.where(mlp, kept, tables["outputs"][column])

    check = compared(tmp_path, attention_only).prediction
    assert 0 < check.n_on < check.n_operands
    assert check.predicted is not None
    assert 0.3 < check.predicted.value < 0.6


def test_metrics_are_judged_on_the_last_quarter(tmp_path: Path) -> None:
    def worse_at_first(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["signals"]
        rows["value"] -= np.where((rows["metric"] == "entropy") & (rows["step"] < 60), 0.5, 0.0)

    found = compared(tmp_path, signal("reward_mean", 0.4), worse_at_first)
    by_metric = {each.metric: each for each in found.signals}
    reward = by_metric["reward_mean"]
    assert reward.change.low < 0.4 < reward.change.high
    assert reward.change.is_clear
    assert not by_metric["entropy"].change.is_clear
    assert by_metric["entropy"].trend_a == "falling"


def test_errors_are_relative_to_a_and_clear_only_where_they_are(tmp_path: Path) -> None:
    def twice_the_error_in_up(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["tensors"]
        hit = rows["module"].astype(str).str.endswith("up_proj") & (rows["role"] == "w_fwd")
        noise = np.random.default_rng(5).uniform(0.98, 1.02, len(rows))
        for column in ("sum_e2", "out_e2"):
            rows[column] *= np.where(hit, 2.0, 1.0) * noise

    found = compared(tmp_path, twice_the_error_in_up)
    clear = {(each.measure, each.role, each.kind) for each in found.errors if each.is_clear}
    assert {("nmse", "w_fwd", "up_proj"), ("output_error", "w_fwd", "up_proj")} <= clear
    assert len(clear) < 0.15 * len(found.errors)
    change = next(each for each in found.errors if (each.measure, each.role, each.kind) == ("nmse", "w_fwd", "up_proj"))
    assert change.ratio == pytest.approx(2.0, rel=0.03)


def test_the_same_run_twice_differs_in_nothing(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert not any(each.is_clear for each in found.errors)
    assert not any(each.change.is_clear for each in found.signals)
    assert found.config == ()
    assert found.prediction.outcome is Outcome.NOT_SWITCHED_ON


def test_configuration_versions_and_command_lines(tmp_path: Path) -> None:
    base = report_frames.inputs(1).run
    target = {**base["target"], "torch": "2.14.0", "pid": 7, "cmdline": ["python", "train.py", "--seed=1", "--of"]}
    found = compared(tmp_path, recipe("mxfp4+of:0.5", 0.25), target=target, config={"every": 20}, pause_ms=99.0)
    changes = {change.name: (change.a, change.b, change.origin) for change in found.config}
    assert changes.pop("recipe in rollout") == ("mxfp4+rceil in 7", "mxfp4+of:0.5 in 7", "measured")
    assert changes == {
        "--seed": ("0", "1", "command line"),
        "--of": ("not set", "given", "command line"),
        "target.torch": ("2.13.0", "2.14.0", "run.json"),
        "config.every": ("not set", "20", "run.json"),
    }


def test_other_modules_shapes_and_phases_are_refused(tmp_path: Path) -> None:
    def rename(tables: dict[str, pd.DataFrame]) -> None:
        for name in ("tensors", "outputs", "whatif", "modules"):
            tables[name]["module"] = "other." + tables[name]["module"].astype(str)

    def reshape(tables: dict[str, pd.DataFrame]) -> None:
        tables["modules"]["shape"] = [[128, 128]] * len(tables["modules"])

    def rollout_only(tables: dict[str, pd.DataFrame]) -> None:
        tables["outputs"] = tables["outputs"].assign(phase="eval")
        tables["tensors"] = tables["tensors"].assign(phase="eval")

    def nothing(tables: dict[str, pd.DataFrame]) -> None:
        for name in ("tensors", "outputs", "whatif"):
            tables[name] = tables[name].iloc[:0]

    for number, (change, words) in enumerate(
        (
            (rename, "no module is in both"),
            (reshape, "different shapes"),
            (rollout_only, "no phase was measured in both"),
            (nothing, "has no measured module"),
        )
    ):
        with pytest.raises(UsageError, match=words):
            compared(tmp_path / str(number), change)


def test_a_few_other_modules_are_left_out_and_said_so(tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        for name in ("tensors", "outputs", "whatif", "modules"):
            names = tables[name]["module"].astype(str)
            tables[name]["module"] = names.str.replace("down_proj", "[bold]down")
        shapes = [[1, 2] if name.endswith("up_proj") else [64, 64] for name in tables["modules"]["module"]]
        tables["modules"]["shape"] = shapes

    found = compared(tmp_path, change)
    said = " ".join(found.alignment.warnings)
    assert "1 modules have another shape in B and are left out: model.layers.0.mlp.up_proj." in said
    assert "measured in A alone" in said
    assert "[bold]down" in said
    assert len(found.alignment.modules) == 5
    assert {each.kind for each in found.errors}.isdisjoint({"up_proj", "down_proj"})


def test_runs_of_other_steps_are_compared_with_a_warning(tmp_path: Path) -> None:
    def later(tables: dict[str, pd.DataFrame]) -> None:
        for name in ("tensors", "outputs", "whatif", "signals", "overhead"):
            tables[name]["step"] += 5_000
        signal("reward_mean", 0.4)(tables)

    found = compared(tmp_path, later)
    assert not found.alignment.is_aligned
    assert any("share fewer than" in warning for warning in found.alignment.warnings)
    reward = next(each for each in found.signals if each.metric == "reward_mean")
    assert reward.change.low < 0.4 < reward.change.high


def test_probed_on_other_steps_is_interpolated() -> None:
    steps = np.arange(0, 240, 10)
    a = pd.Series(np.exp(-steps / 80.0), index=steps)
    b = pd.Series(0.5 * np.exp(-(steps + 4) / 80.0), index=steps + 4)
    *_, ratio, low, high = ratio_of_levels(a, b, paired=True)
    assert ratio == pytest.approx(0.5, rel=0.02)
    assert 0.45 < low < high < 0.55
    assert math.isnan(ratio_of_levels(a * 1e-9, b, paired=True)[2])


def test_json_is_whole_and_strict(tmp_path: Path) -> None:
    a, b = first_run(), run(tmp_path / "b.mxprobe", recipe("none", 0.0))
    result = CliRunner().invoke(main, ["compare", str(a), str(b), "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert data["schema"] == "mxprobe.compare/1"
    assert data["prediction"]["correction"] == "keep_high_precision"
    assert data["prediction"]["measured"]["value"] == 1.0
    assert {"a", "b", "headline", "alignment", "config", "symptom", "signals", "errors"} < data.keys()


def test_terminal_shows_hostile_names_as_they_are(tmp_path: Path) -> None:
    def hostile(tables: dict[str, pd.DataFrame]) -> None:
        for name in ("tensors", "outputs", "whatif", "modules"):
            tables[name]["module"] = tables[name]["module"].astype(str).str.replace("up_proj", "[red]up[/]")

    a, b = run(tmp_path / "a[b].mxprobe", hostile), run(tmp_path / "b.mxprobe", hostile)
    stream = io.StringIO()
    show(compare(open_trace(a), open_trace(b)), show_all=True, console=Console(file=stream, width=200))
    assert "[red]up[/]" in stream.getvalue()
    assert "a[b].mxprobe" in stream.getvalue()


def test_exit_codes(tmp_path: Path) -> None:
    a = first_run()
    assert CliRunner().invoke(main, ["compare", str(a), str(tmp_path / "missing")]).exit_code == 3
    empty = write_trace(tmp_path / "empty.mxprobe", {})
    refused = CliRunner().invoke(main, ["compare", str(a), str(empty)])
    assert refused.exit_code == 2
    assert "has no measured module" in refused.stderr
    one_step = write_trace(tmp_path / "one.mxprobe", frames(n_steps=10, every=10))
    alone = CliRunner().invoke(main, ["compare", str(a), str(one_step)])
    assert alone.exit_code == 0
    assert "Traceback" not in alone.output


def tokens(per_step: float) -> Change:
    """The framework logs so many tokens a step."""

    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["signals"]
        counts = (rows["raw_key"] == "num_tokens").to_numpy()
        rows["metric"] = np.where(counts, "tokens_seen", rows["metric"].astype(str))
        rows["value"] = np.where(counts, rows["step"] * per_step, rows["value"])

    return change


def test_runs_of_unlike_steps_are_aligned_by_tokens(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", tokens(1000)), run(tmp_path / "b", tokens(2000))
    page = tmp_path / "c.html"
    done = CliRunner().invoke(main, ["compare", str(a), str(b), "--by", "tokens", "--json", "-o", str(page)])
    assert done.exit_code == 0, done.stderr
    by_tokens = json.loads(done.stdout)
    assert by_tokens["alignment"]["axis"] == "tokens"
    assert by_tokens["alignment"]["a"] == by_tokens["alignment"]["b"] == {"first": 2000, "last": 120_000}
    assert "aligned by tokens, 2000 to 120000" in page.read_text(encoding="utf-8")
    # After as many tokens B has taken half the steps, and its reward lags behind A's as the curve says.
    reward = next(each for each in by_tokens["signals"] if each["metric"] == "reward_mean")
    curve = 0.55 - 0.45 * np.exp(-np.arange(1, 121) / 24)
    assert reward["b"]["mean"] == pytest.approx(curve[45:60].mean(), abs=0.02)
    assert reward["a"]["mean"] == pytest.approx(curve[90:120].mean(), abs=0.02)
    assert reward["change"]["difference"] == pytest.approx(curve[45:60].mean() - curve[90:120].mean(), abs=0.02)
    said = CliRunner().invoke(main, ["compare", str(a), str(b), "--by", "tokens"]).stdout
    assert "tokens 2000 to 120000 of both" in said


def test_a_run_beside_itself_is_the_same_by_tokens(tmp_path: Path) -> None:
    a = run(tmp_path / "a", tokens(1000))
    done = CliRunner().invoke(main, ["compare", str(a), str(a), "--by", "tokens", "--json"])
    answer = json.loads(done.stdout)
    assert all(each["change"]["difference"] == 0 for each in answer["signals"])
    by_step = json.loads(CliRunner().invoke(main, ["compare", str(a), str(a), "--json"]).stdout)
    assert len(answer["errors"]) == len(by_step["errors"])


def test_a_run_that_counted_no_tokens_is_compared_by_step(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", tokens(1000)), run(tmp_path / "b")
    done = CliRunner().invoke(main, ["compare", str(a), str(b), "--by", "tokens"])
    assert done.exit_code == 2
    assert "its count of tokens was logged at 0 steps" in done.stderr
    assert "compare by step" in done.stderr
