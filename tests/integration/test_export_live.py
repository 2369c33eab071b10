"""`mxprobe export --follow` while another process writes the trace, read back from what the tracker's library wrote."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mxprobe.exporting import curves
from mxprobe.trace import open_trace
from tests.attach_targets import MXPROBE, mxprobe, training, until
from tests.writing import Writing, writing_process


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    with writing_process(tmp_path, n_steps=600, every=2, until_table="overhead") as process:
        yield process


@pytest.fixture
def follow(writing: Writing, tmp_path: Path) -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def start(tracker: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mxprobe", "export", str(writing.directory), "--to", tracker, "--follow"]
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(holds: object, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def logged(directory: Path) -> list[tuple[int, str, float]]:
    """Every value in the run's event file so far; a record cut in the middle ends it."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = list(directory.glob("events.out.tfevents.*"))
    events = EventFileLoader(str(files[0])).Load() if files else ()
    return [(event.step, value.tag, value.tensor.float_val[0]) for event in events for value in event.summary.value]


def expected(directory: Path) -> dict[tuple[int, str], float]:
    return {(point.step, tag): v for point in curves(open_trace(directory)) for tag, v in point.values.items()}


def test_tensorboard_gets_each_value_once_while_the_trace_grows(
    writing: Writing, follow: object, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    process = follow("tensorboard", "-o", str(tmp_path / "runs"))  # type: ignore[operator]
    run = tmp_path / "runs" / "run"
    wait_until(lambda: any(tag.endswith("/nmse") for _, tag, _ in logged(run)))
    assert writing.process.poll() is None
    assert process.poll() is None
    before = len(logged(run))
    wait_until(lambda: len(logged(run)) > before)
    writing.stop()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stdout.startswith(str(run))
    rows = logged(run)
    assert Counter((step, tag) for step, tag, _ in rows).most_common(1)[0][1] == 1
    read = {(step, tag): value for step, tag, value in rows}
    assert read == {key: pytest.approx(value, rel=1e-6) for key, value in expected(writing.directory).items()}


def test_interrupted_it_leaves_a_whole_run_behind(writing: Writing, follow: object, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    process = follow("tensorboard", "-o", str(tmp_path / "runs"))  # type: ignore[operator]
    wait_until(lambda: logged(tmp_path / "runs" / "run"))
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "note: interrupted" in stderr
    assert stdout.startswith(str(tmp_path / "runs" / "run"))
    assert writing.process.poll() is None


def test_trackio_gets_each_value_once(writing: Writing, follow: object, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    process = follow("trackio", "--project", "proof", TRACKIO_DIR=str(tmp_path))  # type: ignore[operator]
    wait_until(lambda: (tmp_path / "proof.db").exists())
    writing.stop()
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    assert stdout == "project proof, run run (trackio show --project proof)\n"
    with sqlite3.connect(tmp_path / "proof.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    values = [((step, tag), value) for step, text in rows for tag, value in json.loads(text).items()]
    assert len(dict(values)) == len(values)
    assert dict(values) == expected(writing.directory)


def test_wandb_offline_and_a_writer_that_dies(writing: Writing, follow: object, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    process = follow("wandb", WANDB_MODE="offline")  # type: ignore[operator]
    wait_until(lambda: list((tmp_path / "wandb").glob("offline-run-*/*.wandb")))
    writing.process.kill()
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    assert "the writer died" in stderr
    (log,) = (tmp_path / stdout.strip()).glob("*.wandb")
    assert b"signals/reward_mean" in log.read_bytes()


@pytest.mark.slow
def test_an_attached_trainer_is_followed_without_a_row_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real agent's order of rows is what settling rests on."""
    pytest.importorskip("tensorboard")
    trace = tmp_path / "run.mxprobe"
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen([*MXPROBE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as base, training(tmp_path) as trainer:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        try:
            attach = start("attach", str(trainer.pid), "-o", str(trace), "--every", "2", "--weights-every", "4")
            until(lambda: (trace / "run.json").exists() or attach.poll() is not None, timeout_s=90)
            assert attach.poll() is None, attach.communicate()
            follower = start("export", str(trace), "--to", "tensorboard", "--follow", "-o", str(tmp_path / "runs"))
            run = tmp_path / "runs" / "run"
            wait_until(lambda: len({step for step, tag, _ in logged(run) if tag.endswith("/nmse")}) >= 3)
            assert mxprobe("detach", trainer.pid).returncode == 0
            attach.communicate(timeout=60)
            _, stderr = follower.communicate(timeout=60)
            assert follower.returncode == 0, stderr
            assert "left out" not in stderr
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    rows = logged(run)
    read = {(step, tag): value for step, tag, value in rows}
    assert len(read) == len(rows)
    assert read == {key: pytest.approx(value, rel=1e-6) for key, value in expected(trace).items()}
