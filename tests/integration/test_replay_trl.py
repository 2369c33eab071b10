"""Replays in a real GRPO run: TRL returns log-probabilities from a fused head, not logits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mxprobe.demo import runner

pytestmark = pytest.mark.slow
pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parents[2]
STEPS = "14"


def run_job(directory: Path, *command: str) -> str:
    """Hash of the final parameters."""
    options = ["--out", str(directory / "job"), "--steps", STEPS, *runner.JOB_OPTIONS[runner.Scenario.OUTLIERS]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [sys.executable, *command, *options],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads((directory / "job" / "result.json").read_text())["parameters_sha256"]


@pytest.fixture(scope="module")
def hashes_and_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    alone, replayed = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("replayed")
    hash_alone = run_job(alone, "-m", "mxprobe.demo.job")
    hash_replayed = run_job(replayed, "-m", "tests.integration.replay_trl_worker", str(replayed / "rows.json"))
    return hash_alone, hash_replayed, json.loads((replayed / "rows.json").read_text())


def test_the_final_parameters_are_the_same_bit_for_bit(hashes_and_rows: tuple[str, str, dict[str, Any]]):
    alone, replayed, rows = hashes_and_rows
    assert replayed == alone
    assert rows["detached"]["n_errors"] == 0, rows["events"]


def test_the_fused_log_probabilities_are_read(hashes_and_rows: tuple[str, str, dict[str, Any]]):
    _, _, rows = hashes_and_rows
    found = rows["sensitivity"]
    modules = {row["module"] for row in found}
    assert "model.layers.0.self_attn.q_proj" in modules
    assert "lm_head" not in modules, "the fused head reads its weight and does not call it"
    assert len(modules) == 14
    assert len({row["step"] for row in found}) >= 3
    for row in found:
        assert row["n_tokens"] > 64, "the completion tokens"
        assert row["n_samples"] >= 16, "as many as have 256 rows"
        assert all(math.isfinite(row[name]) for name in ("sum_delta2", "sum_log_prob_shift", "sum_entropy_shift"))


def test_arms_are_compared_on_the_runs_own_tokens(hashes_and_rows: tuple[str, str, dict[str, Any]]):
    _, _, rows = hashes_and_rows
    arms = {row["arm"]: row for row in rows["replays"] if row["step"] == rows["replays"][0]["step"]}
    assert {row["estimator"] for row in arms.values()} == {"k3"}
    kl = {name: row["sum_kl"] / row["n_tokens"] for name, row in arms.items()}
    assert kl["high"] == 0.0
    assert kl["mxfp8"] < kl["q"] / 10
    assert kl["qstar_dz"] < kl["qstar"], "the planted outliers push the others into the deadzone"
    assert kl.pop("floor") < kl["mxfp8"] / 10
    assert all(math.isfinite(arms[name]["sum_entropy_shift"]) for name in kl)
