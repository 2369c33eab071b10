"""Attach, detach, again: the benchmark's cycles, a few of each mechanism, and not one may do harm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.attach import gdb
from tests.attach_targets import interpreters

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attach_cycles.py"
CYCLES = 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "model"), [("listener", "plain"), ("ptrace", "plain"), ("gdb", "plain"), ("ptrace", "moe")]
)
def test_ten_cycles(mechanism: str, model: str) -> None:
    if mechanism == "gdb" and not gdb.is_here():
        pytest.skip("needs gdb")
    command = [sys.executable, str(SCRIPT), "--mechanism", mechanism, "--cycles", str(CYCLES), "--json"]
    command += ["--target", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name: result[name] for name in ("cycles", "stuck", "crashed", "refused", "left")} == {
        "cycles": CYCLES,
        "stuck": 0,
        "crashed": 0,
        "refused": 0,
        "left": 0,
    }, done.stderr
    assert result["identical"]
    assert len(result["latency_ms"]) == CYCLES
    assert len(result["stopped_ms"]) == (0 if mechanism == "listener" else 2 * CYCLES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchao", "fsdp2", "grpo"])
def test_three_cycles_on_jobs_of_other_kinds(kind: str) -> None:
    """Fake-quantized Linears, two ranks of shards, TRL's trainer; others are test_agent_identity's."""
    for package in {"torchao": ["torchao"], "grpo": ["trl"]}.get(kind, []):
        pytest.importorskip(package)
    command = [sys.executable, str(SCRIPT), "--mechanism", "ptrace", "--cycles", "3", "--target", kind, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    harm = {name: result[name] for name in ("stuck", "crashed", "refused", "left")}
    assert harm == {"stuck": 0, "crashed": 0, "refused": 0, "left": 0}, done.stderr
    assert (result["cycles"], result["identical"]) == (3, True), done.stderr
    assert len(result["latency_ms"]) == 3 * (2 if kind == "fsdp2" else 1)


OTHERS = [python for python in interpreters() if ".pyenv" in python]


@pytest.mark.slow
@pytest.mark.skipif(not OTHERS, reason="needs another interpreter under ~/.pyenv")
def test_three_cycles_on_every_other_python() -> None:
    """Without torch the target is a process that logs."""
    for python in OTHERS:
        command = [sys.executable, str(SCRIPT), "--mechanism", "ptrace", "--cycles", "3", "--python", python, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        harm = {name: result[name] for name in ("stuck", "crashed", "refused", "left")}
        assert harm == {"stuck": 0, "crashed": 0, "refused": 0, "left": 0}, (python, done.stderr)
        assert (result["cycles"], result["identical"]) == (3, True), python
