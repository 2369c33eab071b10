"""Taps on the real libraries, each in a process of its own, against what the library wrote; and real signatures."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mxprobe.agent.taps.batch_readers import BATCH_TAPS
from mxprobe.agent.taps.tap_table import FRAMEWORK_TAPS, Tap
from tests.logger_files import tensorboard_scalars, trackio_logs, wandb_history

PROCESS = Path(__file__).with_name("logger_process.py")
WHEELS = ("verl==0.9.1", "openrlhf==0.11.2", "skyrl==0.3.0", "areal==1.0.4")
SOURCES = {
    "accelerate": {"accelerate.accelerator.Accelerator.log"},
    "wandb": {"wandb.sdk.wandb_run.Run.log"},
    "tensorboard": {"torch.utils.tensorboard.writer.SummaryWriter.add_scalar"},
    "trackio": {"trackio.run.Run.log"},
    "mlflow": {"mlflow.tracking.fluent.log_metric", "mlflow.tracking.fluent.log_metrics"},
    "swanlab": {"swanlab.sdk.internal.run.Run.log"},
    "verl": {"verl.utils.tracking.Tracking.log"},
    "openrlhf": {"openrlhf.utils.logging_utils.TensorboardLogger.log_train"},
}
WRITTEN = [("reward", 2, 0.25), ("entropy", 2, math.nan), ("reward", 3, 0.1), ("entropy", 3, 2.5)]


def listen(library: str, directory: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROCESS), library, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads((directory / "heard.json").read_text())
    assert answer["errors"] == []
    assert all(answer["wrapped"])
    assert all(answer["restored"])
    assert not [event for event in answer["events"] if "not applicable" in event]
    assert {framework for framework, *_ in answer["rows"]} == {library}
    assert {source for _, source, *_ in answer["rows"]} == SOURCES[library]
    return answer


def check_rows(answer: dict[str, Any], prefix: str = "") -> None:
    """One record of each number, in order, while attached; NaN is a number."""
    rows = [(key, step, value) for _, _, key, step, value in answer["rows"]]
    assert [(key, step) for key, step, _ in rows] == [(prefix + key, step) for key, step, _ in WRITTEN]
    assert [value for _, _, value in rows] == pytest.approx([value for _, _, value in WRITTEN], rel=0, nan_ok=True)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Framework -> directory of its unpacked wheel. They cannot be installed beside a current TRL, or without CUDA."""
    out = tmp_path_factory.mktemp("wheels")
    for requirement in WHEELS:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(out), requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"{requirement} cannot be downloaded here: {done.stderr.strip()[-200:]}")
    unpacked: dict[str, Path] = {}
    for path in out.glob("*.whl"):
        framework = path.name.split("-")[0]
        unpacked[framework] = out / framework
        zipfile.ZipFile(path).extractall(unpacked[framework])
    return unpacked


def test_wandb(tmp_path: Path) -> None:
    """`wandb.log` is bound to the run before the attach: the tap has to reach it all the same."""
    check_rows(listen("wandb", tmp_path))
    history = {row["_step"]: row for row in wandb_history(tmp_path / "wandb")}
    assert [history[step]["reward"] for step in (1, 2, 3, 4)] == [0.125, 0.25, 0.1, 1.0]


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    check_rows(listen("tensorboard", tmp_path))
    assert [tensorboard_scalars(tmp_path)[step, "entropy"] for step in (1, 3, 4)] == [[3.5], [2.5], [1.5]]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "trackio", "mlflow", "swanlab"])
def test_other_loggers(library: str, tmp_path: Path) -> None:
    check_rows(listen(library, tmp_path))


@pytest.mark.slow
def test_verl_with_four_backends_is_one_record(wheels: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "wheel").symlink_to(wheels["verl"])
    check_rows(listen("verl", tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "p/e.jsonl").read_text().splitlines()]
    assert [(line["step"], line["data"]["reward"]) for line in lines] == [(1, 0.125), (2, 0.25), (3, 0.1), (4, 1.0)]
    assert tensorboard_scalars(tmp_path)[3, "reward"] == [pytest.approx(0.1)]
    assert len(list(wandb_history(tmp_path / "wandb"))) == 4
    assert len([key for _, key in trackio_logs(tmp_path) if key == "reward"]) > 0


@pytest.mark.slow
def test_openrlhf_logger(wheels: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "wheel").symlink_to(wheels["openrlhf"])
    check_rows(listen("openrlhf", tmp_path), prefix="train/")
    assert tensorboard_scalars(tmp_path)[3, "train/entropy"] == [2.5]


def parameters(tap: Tap, directory: Path) -> list[str] | None:
    """Of the tapped function, read from the source of the wheel; None where there is none."""
    paths = list(directory.rglob(tap.module.replace(".", "/") + ".py"))
    if not paths:
        return None
    body = ast.parse(paths[0].read_text()).body
    if tap.owner:
        (owner,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == tap.owner)
        body = owner.body
    functions = [n for n in body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == tap.function]
    return [argument.arg for argument in functions[0].args.args]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["verl", "openrlhf", "skyrl", "areal"])
def test_signatures_of_released_frameworks(wheels: dict[str, Path], framework: str) -> None:
    taps = [tap for tap in FRAMEWORK_TAPS if tap.framework == framework]
    found = {tap.source: parameters(tap, wheels[framework]) for tap in taps if tap.package == framework}
    assert found
    for tap in taps:
        if tap.package == framework:
            assert {"self", *tap.parameters} <= set(found[tap.source] or ())


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["verl", "areal"])
def test_batch_taps_of_released_frameworks(wheels: dict[str, Path], framework: str) -> None:
    """Of several places by version, the release has one at least, with the parameters that its reader needs."""
    found = {tap.source: parameters(tap, wheels[framework]) for tap in BATCH_TAPS if tap.framework == framework}
    assert any(found.values()), found
    for tap in BATCH_TAPS:
        if found.get(tap.source) is not None:
            assert set(tap.parameters) <= set(found[tap.source] or ())
