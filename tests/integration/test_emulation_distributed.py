"""Emulation under DDP and FSDP2, two processes on gloo: gradients are the mean of what each rank computes alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("emulated_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["emulate-first", "wrap-first"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_average_their_emulated_gradients(wrapper: str, order: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    rendezvous = f"file://{tmp_path}/rendezvous"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), wrapper, order, rendezvous],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    assert all("gradients agree" in output for output in outputs)
