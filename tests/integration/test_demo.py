"""The main job, end to end: a real GRPO run, attached by PID from outside, read back, judged from the trace alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mxprobe.demo.runner import DETACH_AT, STEPS, DemoPaths, Scenario, job_command, read_steps
from mxprobe.trace import open_trace

CLOCK_KEYS = {"step_time"}


def mxprobe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mxprobe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@dataclass(frozen=True)
class DemoRun:
    paths: DemoPaths
    stdout: str
    recommendation: dict[str, Any]


def run_demo(scenario: Scenario, seed: int, directory: Path, *options: str) -> DemoRun:
    done = mxprobe("demo", "--scenario", scenario, "--seed", str(seed), "-o", str(directory), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = DemoPaths(directory)
    recommended = mxprobe("recommend", str(paths.trace), "--json")
    assert recommended.returncode == 0, recommended.stderr
    return DemoRun(paths, done.stdout, json.loads(recommended.stdout))


def check_verdict(run: DemoRun, scenario: Scenario) -> None:
    """What each scenario calls for. The engine never sees the scenario's name: it is not in the trace's data."""
    answer = run.recommendation
    if scenario is Scenario.HEALTHY:
        assert answer["verdict"] == "none_needed"
        assert answer["chosen"] == []
    elif scenario is Scenario.STALE:
        assert answer["verdict"] == "not_explained"
        assert answer["chosen"] == []
    else:
        assert answer["verdict"] in ("enable", "undecided")
        assert answer["component"] == "deadzone"
        groups = {(group["kind"], group["role"]) for group in answer["where"]["groups"]}
        assert groups == {(f"{kind}_proj", "x_fwd") for kind in ("q", "k", "v", "gate", "up")}
        assert answer["chosen"][0] in ("of:0.5", "of:1.0")


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The one demo run of the default suite."""
    return run_demo(Scenario.OUTLIERS, 0, tmp_path_factory.mktemp("demo") / "outliers", "--once")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """With the second run, which follows the advice of the first."""
    return run_demo(Scenario.OUTLIERS, 0, tmp_path_factory.mktemp("demo") / "loop")


def test_outliers(outliers: DemoRun) -> None:
    check_verdict(outliers, Scenario.OUTLIERS)
    assert outliers.recommendation["headline"].split()[0] in outliers.stdout
    assert outliers.paths.report.stat().st_size > 1_000_000  # plotly.js and the data are inside


@pytest.mark.slow
def test_following_the_advice_does_what_was_predicted(loop: DemoRun) -> None:
    compared = mxprobe("compare", str(loop.paths.trace), str(loop.paths.second.trace), "--json")
    assert compared.returncode == 0, compared.stderr
    answer = json.loads(compared.stdout)
    outcome = answer["prediction"]["outcome"]
    assert outcome in ("helped as predicted", "helped more than predicted"), answer["prediction"]
    rewards = [
        sum(step.reward for step in read_steps(paths.job / "metrics.jsonl")[-25:]) / 25
        for paths in (loop.paths, loop.paths.second)
    ]
    assert rewards[1] > rewards[0] + 0.1
    lines = {line.split("  ")[0]: line for line in loop.stdout.splitlines()}
    assert lines["replayed KL"].rstrip().endswith("as predicted")
    assert lines["mismatch"].rstrip().endswith("as predicted")


@pytest.mark.browser
def test_page_of_the_demo_holds_data(outliers: DemoRun) -> None:
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1080})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(outliers.paths.report.as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg")
        drawn = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].filter(c => c.data?.length).length")
        browser.close()
    assert complaints == []
    assert drawn >= 6


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [Scenario.HEALTHY, Scenario.STALE])
def test_other_scenarios(scenario: Scenario, tmp_path: Path) -> None:
    run = run_demo(scenario, 0, tmp_path / scenario)
    check_verdict(run, scenario)
    assert not run.paths.second.directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scenario", list(Scenario))
def test_more_seeds(scenario: Scenario, seed: int, tmp_path: Path) -> None:
    check_verdict(run_demo(scenario, seed, tmp_path / scenario, "--once"), scenario)


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """The job's log, all digits, without what a clock says."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK_KEYS} for line in lines]


@pytest.mark.parametrize("steps", [60, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_training_is_bit_identical_with_and_without_attach(outliers: DemoRun, steps: int, tmp_path: Path) -> None:
    """Sixty steps are probed six times; the whole run ends in the same parameters."""
    command = job_command(Scenario.OUTLIERS, seed=0, out=tmp_path, steps=steps)
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    control = metrics_of(tmp_path)
    assert len(control) == steps
    assert metrics_of(outliers.paths.job)[:steps] == control
    if steps == STEPS:
        hashes = [
            json.loads((directory / "result.json").read_text())["parameters_sha256"]
            for directory in (tmp_path, outliers.paths.job)
        ]
        assert hashes[0] == hashes[1]


def test_signals_are_the_jobs_own_numbers(outliers: DemoRun) -> None:
    signals = open_trace(outliers.paths.trace).signals()
    rewards = signals[signals.metric == "reward_mean"].set_index("step").value
    logged = {step.step: step.reward for step in read_steps(outliers.paths.job / "metrics.jsonl")}
    assert len(rewards) > 0.8 * DETACH_AT
    assert rewards.index.is_unique
    assert all(logged[step] == value for step, value in rewards.items())


def test_steps_are_the_trainers_own(outliers: DemoRun) -> None:
    trace = open_trace(outliers.paths.trace)
    assert trace.is_complete
    assert trace.problems == []
    probed = sorted(trace.tensors().step.unique())
    assert len(probed) >= 20
    assert probed[0] > 1
    assert probed[-1] <= DETACH_AT + 2
    roles = trace.tensors().groupby("role", observed=True).step.nunique()
    assert set(roles.index) == {"x_fwd", "w_fwd", "g_dgrad", "w_dgrad", "g_wgrad", "x_wgrad"}


def test_output_directory_must_be_new(tmp_path: Path) -> None:
    done = mxprobe("demo", "-o", str(tmp_path))
    assert done.returncode == 2
    assert "exists already" in done.stderr
