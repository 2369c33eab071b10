"""Each tracker through its own library, in a process of its own as a user would, read back from what it wrote."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.exporting import curves
from mxprobe.trace import open_trace
from tests.trace_files import frames, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trackers") / "run.mxprobe", frames(n_layers=1, n_steps=30))


def export(trace: Path, tracker: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mxprobe", "export", str(trace), "--to", tracker, *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_tensorboard(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    result = export(trace, "tensorboard", "-o", str(tmp_path))
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "run").iterdir()
    read: dict[tuple[int, str], float] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            read[event.step, value.tag] = value.tensor.float_val[0]
    expected = {(point.step, tag): value for point in curves(open_trace(trace)) for tag, value in point.values.items()}
    assert read == {key: pytest.approx(value, rel=1e-6) for key, value in expected.items()}

    again = export(trace, "tensorboard", "-o", str(tmp_path))
    assert again.returncode == 2
    assert "holds a TensorBoard run already" in again.stderr


def test_wandb_offline(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    result = export(trace, "wandb", "-o", str(tmp_path), "--name", "mine", WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    run = Path(result.stdout.strip())
    assert run.parent == tmp_path / "wandb"
    (log,) = run.glob("*.wandb")
    n_curves = len({tag for point in curves(open_trace(trace)) for tag in point.values})
    assert n_curves > 50
    assert log.stat().st_size > 30 * n_curves  # every step's values are in it
    assert b"signals/reward_mean" in log.read_bytes()


def test_wandb_without_a_login_is_refused_in_words(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    result = export(
        trace,
        "wandb",
        "-o",
        str(tmp_path),
        WANDB_MODE="online",
        WANDB_API_KEY="",
        HOME=str(tmp_path),
        NETRC="/dev/null",
    )
    assert result.returncode == 2
    assert "wandb refused" in result.stderr
    assert "Traceback" not in result.stderr


def test_trackio(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    result = export(trace, "trackio", "--project", "proof", TRACKIO_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "project proof, run run (trackio show --project proof)\n"
    with sqlite3.connect(tmp_path / "proof.db") as database:
        rows = dict(database.execute("select step, metrics from metrics").fetchall())
    points = {point.step: point.values for point in curves(open_trace(trace))}
    assert rows.keys() == points.keys()
    assert json.loads(rows[20]) == points[20]


def test_a_missing_library_is_named_with_its_remedy(trace: Path, tmp_path: Path) -> None:
    """A package of that name that cannot be imported stands for one that is not there."""
    (tmp_path / "wandb.py").write_text("raise ImportError('No module named wandb')\n")
    result = export(trace, "wandb", PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert "pip install wandb" in result.stderr
    assert "Traceback" not in result.stderr
