"""Two training actors of a real Ray cluster, attached while they are busy; the one without torch is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from mxprobe.trace import open_trace
from tests.attach_targets import mxprobe, until

SCRIPT = str(Path(__file__).with_name("ray_training.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
]


def losses(directory: Path, rank: int) -> list[str]:
    path = directory / f"losses.{rank}"
    return path.read_text().splitlines() if path.exists() else []


ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@contextmanager
def training(directory: Path, log: Path, *options: str) -> Generator[tuple[subprocess.Popen[bytes], str]]:
    """(driver, address) of a cluster whose actors train."""
    directory.mkdir()
    with open(log, "wb") as file:
        driver = subprocess.Popen(
            [sys.executable, SCRIPT, str(directory), *options],
            env=ENVIRON,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until(lambda: all(len(losses(directory, rank)) > 5 for rank in range(2)) or driver.poll(), timeout_s=120)
        assert driver.poll() is None, log.read_text()
        yield driver, (directory / "address").read_text()
        (directory / "stop").touch()
        assert driver.wait(120) == 0, log.read_text()
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def assert_untouched(attached: Path, control: Path) -> None:
    control.mkdir()
    subprocess.run([sys.executable, SCRIPT, str(control), "--control", str(attached)], env=ENVIRON, check=True)
    for rank in range(2):
        assert losses(attached, rank) == losses(control, rank)
        assert losses(attached, rank)[-1].startswith("end ")


OPTIONS = ("--duration", "2", "--every", "5", "--weights-every", "20")


def test_the_training_actors_of_a_cluster(tmp_path: Path) -> None:
    attached, trace = tmp_path / "attached", tmp_path / "a.mxprobe"
    with training(attached, tmp_path / "log") as (_, address):
        done = mxprobe("attach", "--ray", address, "-o", str(trace), *OPTIONS, timeout_s=180, env=ENVIRON)
        assert done.returncode == 0, done.stderr
        assert "3 actors on this machine" in done.stderr
        assert "has not imported torch" not in done.stderr
    assert_untouched(attached, tmp_path / "control")

    facts = json.loads((trace / "run.json").read_text())
    pids = [int(pid) for pid in (attached / "pids").read_text().split()]
    assert [(rank["rank"], rank["pid"]) for rank in facts["ranks"]] == list(enumerate(pids))
    assert {(rank["role"], rank["ended"]["reason"]) for rank in facts["ranks"]} == {("trainer", "duration")}
    assert [each["reason"] for each in facts["refused"]] == ["no_torch"]
    assert set(open_trace(trace).tensors()["rank"]) == {0, 1}


def test_actors_on_two_nodes_come_into_one_trace(tmp_path: Path) -> None:
    attached, trace = tmp_path / "attached", tmp_path / "a.mxprobe"
    with training(attached, tmp_path / "log", "--two-nodes") as (_, address):
        command = [sys.executable, "-m", "mxprobe", "attach", "--ray", address, "-o", str(trace), *OPTIONS[2:]]
        with open(tmp_path / "attach.log", "wb") as log:
            attach = subprocess.Popen(command, env=ENVIRON, stdout=log, stderr=log)

        def said() -> str:
            return (tmp_path / "attach.log").read_text()

        def measured() -> bool:
            assert attach.poll() is None, said()
            return (trace / "run.json").exists() and set(open_trace(trace).tensors()["rank"]) == {0, 1}

        try:
            until(measured, timeout_s=180)  # while it is being recorded
            attach.send_signal(signal.SIGINT)
            assert attach.wait(120) == 0, said()
        finally:
            attach.kill()
            attach.wait()
    assert_untouched(attached, tmp_path / "control")

    facts = open_trace(trace).run
    pids = [int(pid) for pid in (attached / "pids").read_text().split()]
    assert sorted((rank["rank"], rank["pid"]) for rank in facts["ranks"]) == list(enumerate(pids))
    assert {(rank["role"], rank["ended"]["reason"]) for rank in facts["ranks"]} == {("trainer", "interrupted")}
    assert len({rank["node"] for rank in facts["ranks"]}) == 2
    assert facts["closed_ns"]
    assert "actors on 2 nodes" in said()
    assert not list((trace / "live").rglob("*.arrows"))
