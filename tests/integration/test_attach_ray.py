"""Two training actors of a real Ray cluster, attached while they are busy; the one without torch is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


def test_the_training_actors_of_a_cluster(tmp_path: Path) -> None:
    attached, control, trace = tmp_path / "attached", tmp_path / "control", tmp_path / "a.mxprobe"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    for directory in (attached, control):
        directory.mkdir()
    with open(tmp_path / "log", "wb") as log:
        driver = subprocess.Popen(
            [sys.executable, SCRIPT, str(attached)], env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until(lambda: all(len(losses(attached, rank)) > 5 for rank in range(2)) or driver.poll(), timeout_s=120)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        address = (attached / "address").read_text()
        options = ("-o", str(trace), "--duration", "2", "--every", "5", "--weights-every", "20")
        done = mxprobe("attach", "--ray", address, *options, timeout_s=180, env=environ)
        assert done.returncode == 0, done.stderr
        assert "3 actors on this machine" in done.stderr
        assert "has not imported torch" not in done.stderr
        assert driver.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    subprocess.run([sys.executable, SCRIPT, str(control), "--control"], env=environ, check=True)
    for rank in range(2):
        assert losses(attached, rank) == losses(control, rank)
        assert losses(attached, rank)[-1].startswith("end ")

    facts = json.loads((trace / "run.json").read_text())
    pids = [int(pid) for pid in (attached / "pids").read_text().split()]
    assert [(rank["rank"], rank["pid"]) for rank in facts["ranks"]] == list(enumerate(pids))
    assert {(rank["role"], rank["ended"]["reason"]) for rank in facts["ranks"]} == {("trainer", "duration")}
    assert [each["reason"] for each in facts["refused"]] == ["no_torch"]
    assert set(open_trace(trace).tensors()["rank"]) == {0, 1}
