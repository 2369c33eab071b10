"""Two ranks of DistributedDataParallel replay, forwards and backwards, without a word to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("replay_ddp_worker.py")


@pytest.mark.slow
def test_two_ranks_are_bit_identical_and_both_have_gradients(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(WORKER), f"file://{tmp_path}/rendezvous", str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for output in outputs:
        facts = json.loads(output.splitlines()[-1])
        assert facts["same"]
        assert facts["errors"] == 0
        assert facts["replays"] > 0
        assert facts["replay_gradients"] == 8 * facts["replays"]
