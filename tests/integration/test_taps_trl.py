"""A real GRPO run with wandb (offline), TensorBoard and trackio on: what was heard against what they wrote."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mxprobe.agent.taps.signal_taps import NO_STEP
from mxprobe.metrics import resolve
from tests.logger_files import Written, tensorboard_scalars, trackio_logs, wandb_history

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("trl_signals_job.py")
ATTACHED_STEPS = range(3, 9)
TRAINER = "transformers.trainer.Trainer.log"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(JOB), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "rows.json").read_text())


@pytest.fixture(scope="module")
def heard(result: dict[str, Any]) -> Written:
    """The trainer's metrics, under the names that its callbacks give them: `train/...`, `eval/...`."""
    written: Written = defaultdict(list)
    for row in result["rows"]:
        if row["source"] == TRAINER:
            key = row["raw_key"]
            renamed = f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
            written[row["step"], renamed].append(row["value"])
    return dict(written)


def while_attached(written: Written) -> Written:
    return {
        (step, key): values
        for (step, key), values in written.items()
        if step in ATTACHED_STEPS and key.startswith(("train/", "eval/")) and key != "train/global_step"
    }


def float32(written: Written) -> Written:
    return {at: [struct.unpack("f", struct.pack("f", value))[0] for value in values] for at, values in written.items()}


def test_equal_to_what_wandb_wrote(directory: Path, heard: Written) -> None:
    written: Written = defaultdict(list)
    for row in wandb_history(directory / "wandb"):
        if any(key.startswith("profiling/") for key in row):
            continue  # not the trainer's log
        for key, value in row.items():
            written[int(row.get("train/global_step", NO_STEP)), key].append(value)
    assert while_attached(written) == heard


def test_equal_to_what_tensorboard_wrote(directory: Path, heard: Written) -> None:
    assert while_attached(tensorboard_scalars(directory / "tensorboard")) == float32(heard)


def test_equal_to_what_trackio_wrote(directory: Path, heard: Written) -> None:
    assert while_attached(trackio_logs(directory / "trackio")) == heard


def test_each_metric_once(result: dict[str, Any], heard: Written) -> None:
    assert {step for step, _ in heard} == set(ATTACHED_STEPS)
    twice = {key for (_, key), values in heard.items() if len(values) > 1}
    assert twice == {"train/epoch"}  # the trainer itself logs it again when it evaluates
    others = [row for row in result["rows"] if row["source"] != TRAINER]
    assert {row["raw_key"].split("/")[0] for row in others} == {"profiling"}
    assert {row["source"] for row in others} == {"wandb.sdk.wandb_run.Run.log"}  # and not trackio's copy of it
    assert {row["step"] for row in others} == {NO_STEP}


def test_what_was_heard_is_understood(heard: Written) -> None:
    unmapped = {key for _, key in heard if key.startswith("train/") and resolve("trl", key[6:]) is None}
    assert unmapped == {"train/clip_ratio/low_min", "train/clip_ratio/high_max"}
    assert all(resolve("trl", "eval_" + key[5:]) is None for _, key in heard if key.startswith("eval/"))


def test_everything_is_as_before(result: dict[str, Any]) -> None:
    assert result["errors"] == []
    assert set(result["wrapped"]) == {"trainer", "wandb", "tensorboard", "trackio", "wandb.log"}
    assert all(result["wrapped"].values())
    assert all(result["restored"].values())
    assert not [event for event in result["events"] if "not applicable" in event]
