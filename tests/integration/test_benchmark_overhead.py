"""The benchmark that measures 200 whole steps, at a tiny size: what it prints, not how much."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_whole_steps_with_probes_and_a_replay_are_measured() -> None:
    command = [sys.executable, "benchmarks/overhead.py", "--whole", "--pairs", "1", "--period", "8", "--tokens", "128"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| 1, "))
    found = re.fullmatch(r"\| 1, (\d+) steps \| .+% \| .+% \| .+% \| (\d+) \| (\d+) \| .+ \|", row)
    assert found, done.stdout
    n_steps, n_probes, n_replays = map(int, found.groups())
    assert n_steps == 8
    assert n_probes + n_replays >= 1  # the account of --max-overhead may put either off
