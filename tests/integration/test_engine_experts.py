"""Two real processes by the command line: a transformers trainer with fused experts, an engine with vLLM's names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from mxprobe.attribution.held_versions import WRONG, HeldVersion, held_versions
from mxprobe.trace import open_trace
from tests.attach_targets import mxprobe, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PARTS = ("gate_proj", "up_proj", "down_proj")
EVERY = {f"model.layers.{n}.mlp.experts.{e}.{p}" for n in range(2) for e in range(4) for p in PARTS}
BEHIND = {name for name in EVERY if name.startswith("model.layers.1.")}
TURNED = "model.layers.0.mlp.experts.2.down_proj"
TIMEOUT_S = 240.0


@pytest.fixture
def running(tmp_path: Path) -> Generator[tuple[Path, list[str]]]:
    """(their directory, [pid of the trainer, pid of the engine])"""
    directory = tmp_path / "sync"
    directory.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.moe_sync", role, str(directory)],
                env=environ,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
            for role in ("trainer", "engine")
        ]
    try:
        until(lambda: n_synced(directory) > 3 or any(p.poll() is not None for p in processes), timeout_s=TIMEOUT_S)
        assert all(p.poll() is None for p in processes), (tmp_path / "log").read_text()
        yield directory, [str(p.pid) for p in processes]
    finally:
        (directory / "stop").touch()
        for process in processes:
            process.wait(60)


def n_synced(directory: Path) -> int:
    return len(list(directory.glob("loaded.*")))


def held(trace: Path) -> dict[str, HeldVersion]:
    opened = open_trace(trace)
    return {each.module: each for each in held_versions(opened, opened)}


def in_state(trace: Path, *states: str) -> set[str]:
    return {name for name, each in held(trace).items() if each.state in states}


def slowly(condition: Callable[[], bool]) -> None:
    """The trace is read again and again while it grows."""

    def asked() -> bool:
        time.sleep(0.5)
        return condition()

    until(asked, timeout_s=TIMEOUT_S)


def test_an_engine_that_is_torn_from_a_trainer_with_fused_experts_is_named_by_layer_and_expert(
    running: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory, pids = running
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    trace = tmp_path / "run.mxprobe"
    how = ("--every", "30", "--sensitivity-every", "0", "--layers", "*.experts.*", "--step-timeout", "6s")
    attached = mxprobe("attach", *pids, *how, "--background", "-o", str(trace), timeout_s=TIMEOUT_S)
    assert attached.returncode == 0, attached.stderr
    slowly(lambda: in_state(trace, "current") == EVERY)
    healthy = json.loads(mxprobe("audit", str(trace), "--json", timeout_s=TIMEOUT_S).stdout)
    assert not [each for each in healthy["findings"] if "by its codes" in each["detail"]]

    (directory / "plant").touch()
    slowly(lambda: in_state(trace, "behind") == BEHIND and in_state(trace, "transposed") == {TURNED})
    for pid in pids:
        assert mxprobe("detach", pid, timeout_s=TIMEOUT_S).returncode == 0
    assert in_state(trace, *WRONG) == BEHIND | {TURNED}

    audited: dict[str, Any] = json.loads(mxprobe("audit", str(trace), "--json", timeout_s=TIMEOUT_S).stdout)
    named = {each["pitfall"]: each for each in audited["findings"] if "by its codes" in each["detail"]}
    assert set(named["partial_refit"]["modules"]) == BEHIND
    assert "rounded as mxfp4 rceil" in named["partial_refit"]["detail"]
    assert " behind" in named["partial_refit"]["detail"]
    assert named["reordered_weights"]["modules"] == [TURNED]

    advice = mxprobe("recommend", str(trace), "--explain", timeout_s=TIMEOUT_S)
    assert advice.returncode == 0, advice.stderr
    words = " ".join(advice.stdout.split())
    assert f"{len(BEHIND) + 1} of {len(EVERY)} weights of the rollout engine" in words
    report = mxprobe("report", str(trace), "-o", str(tmp_path / "run.html"), timeout_s=TIMEOUT_S)
    assert report.returncode == 0, report.stderr
    assert "holds the trainer&#39;s weights of step" in (tmp_path / "run.html").read_text()
