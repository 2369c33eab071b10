"""Attach, detach, again: the benchmark's cycles, a few of each mechanism, and not one may do harm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.attach import gdb

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attach_cycles.py"
CYCLES = 10


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["listener", "ptrace", "gdb"])
def test_ten_cycles(mechanism: str) -> None:
    if mechanism == "gdb" and not gdb.is_here():
        pytest.skip("needs gdb")
    command = [sys.executable, str(SCRIPT), "--mechanism", mechanism, "--cycles", str(CYCLES), "--json"]
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
