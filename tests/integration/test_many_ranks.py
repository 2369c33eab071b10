"""Eight ranks of one job attached at once and detached at once, again and again; and one of several that is killed.

`MXPROBE_JOB_CYCLES=20` for more of the former.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mxprobe.trace import open_trace
from tests.attach_targets import MXPROBE, mxprobe, statements_in_memory, until
from tests.integration.test_attach_job import TORCHRUN, facts_of, launched

SCHEDULE = ("--every", "5", "--weights-every", "20", "--sensitivity-every", "0")
N_RANKS = 8
N_CYCLES = int(os.environ.get("MXPROBE_JOB_CYCLES", "2"))
PATIENCE_S = 120.0

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def private_base(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base, f"mxprobe-{os.getuid()}")


def test_eight_ranks_at_once(tmp_path: Path) -> None:
    launcher = (*TORCHRUN, f"--nproc-per-node={N_RANKS}")
    # Steps far apart: the control has to repeat as many.
    with launched(tmp_path / "attached", launcher, N_RANKS, "0", "--pause-s", "0.2") as job:
        for cycle in range(N_CYCLES):
            trace = tmp_path / f"{cycle}.mxprobe"
            attach = ("attach", "--job", job.pid, "-o", str(trace), "--background", *SCHEDULE)
            done = mxprobe(*attach, timeout_s=PATIENCE_S)
            assert done.returncode == 0, done.stderr
            job.wait_for_steps(10)
            done = mxprobe("detach", "--job", str(job.pids[cycle % N_RANKS]), timeout_s=PATIENCE_S)
            assert done.returncode == 0, done.stderr
            ranks = facts_of(trace)["ranks"]
            assert [(rank["rank"], rank["pid"]) for rank in ranks] == list(enumerate(job.pids))
            assert {(rank["ended"]["reason"], rank["agent"]["n_errors"]) for rank in ranks} == {("detached", 0)}
            opened = open_trace(trace)
            assert (opened.is_complete, opened.problems) == (True, [])
            assert set(opened.overhead()["rank"]) == set(range(N_RANKS))
            job.wait_for_steps(3)
        assert [statements_in_memory(pid) for pid in job.pids] == [0] * N_RANKS
        (tmp_path / "attached" / "stop").touch()
        until(lambda: all(lines[-1].startswith("end ") for lines in job.all_losses), timeout_s=10 * PATIENCE_S)
        seen = job.all_losses
    n_steps = {len(losses) - 1 for losses in seen}
    assert len(n_steps) == 1
    with launched(tmp_path / "control", launcher, N_RANKS, str(n_steps.pop()), "--pause-s", "0") as control:
        ended = lambda: all(lines and lines[-1].startswith("end ") for lines in control.all_losses)  # noqa: E731
        until(ended, timeout_s=10 * PATIENCE_S)
        assert control.all_losses == seen


@contextmanager
def recording(command: list[str]) -> Generator[subprocess.Popen[str]]:
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield controller
    finally:
        controller.kill()
        controller.communicate()


# A rank of a job that shares nothing while it trains, as between two merges of local training: torchrun would end all
# ranks with the first, and so would the next collective.
RANK = """
import os, sys, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = open(sys.argv[1], "w", buffering=1)
while True:
    loss = model(torch.randn(16, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.write(loss.item().hex() + "\\n")
    time.sleep(0.01)
"""


def test_a_rank_that_is_killed_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    trace, page = tmp_path / "a.mxprobe", tmp_path / "report.html"
    losses = [tmp_path / f"losses.{rank}" for rank in range(3)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(path)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for rank, path in enumerate(losses)
    ]
    command = [*MXPROBE, "attach", *(str(each.pid) for each in ranks), "-o", str(trace), *SCHEDULE]
    try:
        until(lambda: all(path.exists() and path.stat().st_size > 200 for path in losses), timeout_s=PATIENCE_S)
        with recording(command) as controller:
            overhead = lambda: {path.parent.name for path in trace.glob("live/rank=*/overhead*")}  # noqa: E731
            until(lambda: len(overhead()) == 3 or controller.poll() is not None, timeout_s=PATIENCE_S)
            assert controller.poll() is None, controller.communicate()
            ranks[1].kill()
            ranks[1].wait()

            def told() -> set[str]:
                survivors = [str(ranks[rank].pid) for rank in (0, 2)]
                answers = json.loads(mxprobe("status", "--json", *survivors, timeout_s=PATIENCE_S).stdout)
                assert [answer["rank"] for answer in answers] == [0, 2]
                return {words for answer in answers for words in answer["lost_ranks"]}

            words = f"rank 1, process {ranks[1].pid}, ended while others went on (target_exited)"
            until(lambda: told() == {words}, timeout_s=PATIENCE_S)
            assert words in mxprobe("status", str(ranks[0].pid), timeout_s=PATIENCE_S).stdout
            assert [ranks[rank].poll() for rank in (0, 2)] == [None, None]
            controller.send_signal(signal.SIGINT)
            _, err = controller.communicate(timeout=PATIENCE_S)
            assert controller.returncode == 0, err
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    opened = open_trace(trace)
    assert (opened.is_complete, opened.problems) == (True, [])
    last = opened.overhead().groupby("rank")["step"].max()
    assert last[1] < min(last[0], last[2])
    assert [rank["ended"]["reason"] for rank in facts_of(trace)["ranks"]] == [
        "interrupted",
        "target_exited",
        "interrupted",
    ]
    done = mxprobe("report", str(trace), "-o", str(page), timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert words in page.read_text()
