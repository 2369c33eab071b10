"""The audit of traces that no run can be made to give: non-finite values, two traces, names from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from mxprobe.audit import PITFALLS, Audit, audit
from mxprobe.cli import main
from mxprobe.cli.audit import show
from mxprobe.trace import TraceWriter, open_trace

MX = "mxfp4+rceil"


def write(directory: Path, outputs: list[dict[str, Any]], events: list[tuple[int, str, str]] | None = None) -> Path:
    shared = {"micro_step": 0, "time_ns": 1, "sampled_frac": 1.0, "n_rows": 8, "ref2": 1.0, "residual2": 0.0}
    defaults = {"step": 10, "exact": True, "realised2": 0.02, "predicted2": 0.02, "weight_lag": 0}
    rows = [{**shared, **defaults, **row} for row in outputs]
    with TraceWriter(directory, {}) as writer:
        writer.append("outputs", {name: [row[name] for row in rows] for name in rows[0]})
        for step, kind, detail in events or []:
            writer.append("events", {"step": [step], "time_ns": [1], "kind": [kind], "detail": [detail]})
    return directory


def row(module: str, phase: str, recipe: str = MX, **changes: Any) -> dict[str, Any]:
    return {"module": module, "phase": phase, "recipe_x": recipe, "recipe_w": recipe, **changes}


def both(module: str = "up_proj", recipe: str = MX, **changes: Any) -> list[dict[str, Any]]:
    return [row(module, phase, recipe, **changes) for phase in ("train", "rollout")]


def slugs(result: Audit) -> list[str]:
    return [finding.pitfall.slug for finding in result.findings]


def test_non_finite_values_are_told_with_the_first_place(tmp_path: Path):
    told = [
        (30, "nonfinite", "up_proj x_fwd: 3 non-finite elements, 1 blocks left out"),
        (20, "nonfinite", "down_proj g_dgrad: 1 non-finite elements, 1 blocks left out"),
    ]
    (finding,) = audit(open_trace(write(tmp_path / "t", both(), told))).findings
    assert finding.pitfall is PITFALLS["nonfinite"]
    assert finding.modules == ("down_proj", "up_proj")
    assert finding.detail == "first at step 20 in down_proj g_dgrad"


def test_two_traces_are_joined_by_module(tmp_path: Path):
    trainer = write(tmp_path / "a", [row("up_proj", "train", "mxfp4+floor"), row("up_proj", "rollout")])
    rollout = write(tmp_path / "b", [row("up_proj", "rollout", "mxfp4+even", weight_lag=None)])
    joined = audit(open_trace(trainer), open_trace(rollout))
    assert slugs(joined) == ["recipe_mismatch"]
    assert joined.findings[0].detail == "mxfp4 floor in training, mxfp4 even in rollout"
    assert (joined.trainer, joined.rollout) == (str(trainer), str(rollout))


@pytest.mark.parametrize(("n_exact", "clean"), [(10, True), (9, True), (8, False)])
def test_one_recipe_must_hold_in_nine_rows_of_ten(n_exact: int, clean: bool, tmp_path: Path):
    rollouts = [row("up_proj", "rollout", step=i, exact=i < n_exact, weight_lag=None) for i in range(10)]
    result = audit(open_trace(write(tmp_path / "t", [row("up_proj", "train"), *rollouts])))
    assert slugs(result) == ([] if clean else ["unknown_weights"])


def test_what_16_bit_arithmetic_makes_is_no_finding(tmp_path: Path):
    result = audit(open_trace(write(tmp_path / "t", both(exact=False, realised2=1e-5, weight_lag=None))))
    assert result.is_clean
    assert {side.words for side in result.modules[0].sides} == {"high precision"}


def test_an_intended_pattern_on_both_sides_is_clean(tmp_path: Path):
    rows = [*both("q_proj"), *both("router", "none", realised2=0.0), *both("lm_head", "none", realised2=0.0)]
    assert audit(open_trace(write(tmp_path / "t", rows))).is_clean


def test_names_are_text_and_lines_fit(tmp_path: Path):
    hostile = "mlp[up]\x1b[31m" + "x" * 60
    result = audit(open_trace(write(tmp_path / "t", [row(hostile, "train"), row(hostile, "rollout", "mxfp4+floor")])))
    console = Console(width=100, record=True, file=None, highlight=False)
    with console.capture() as captured:
        show(result, show_all=True, console=console)
    text = captured.get()
    assert "\x1b[31m" not in text
    assert "mlp[up]" in text
    assert max(map(len, text.splitlines())) <= 100
    assert PITFALLS["recipe_mismatch"].symptom[:30] in text


def test_a_directory_that_is_no_trace(tmp_path: Path):
    done = CliRunner().invoke(main, ["audit", str(tmp_path)])
    assert done.exit_code == 3
    assert "is not a trace" in done.output
