"""The benchmark's soak, a few cycles of it: nothing of ours is left in the job after any of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_few_cycles_leave_nothing() -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "0.5", "--cycles", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"]
    assert result["cycles"] >= 1
    assert (result["errors"], result["dropped"]) == (0, 0)
    before, *after = result["job"]
    for sample in after:
        held = ("threads", "descriptors", "hooks", "modules")
        assert {name: sample[name] for name in held} == {name: before[name] for name in held}
