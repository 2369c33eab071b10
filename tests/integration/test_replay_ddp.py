"""Two ranks replay, forwards and backwards, without a word to each other: replicated (DDP) and sharded (FSDP2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("replay_ddp_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_ranks_are_bit_identical_and_both_have_gradients(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(WORKER), f"file://{tmp_path}/rendezvous", str(tmp_path), how]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for output in outputs:
        facts = json.loads(output.splitlines()[-1])
        assert facts["like_unsharded"]
        assert facts["same"]
        assert facts["errors"] == 0
        assert facts["replays"] > 0, facts["events"]
        assert facts["sensitivity"] > 0
        assert facts["replay_gradients"] == 8 * facts["replays"]
        for said, expected in zip(
            facts["refusals"], ("would be copied whole; at most", "was not gathered"), strict=False
        ):
            assert expected in said
        assert len(facts["refusals"]) == (2 if how == "fsdp2" else 0)
