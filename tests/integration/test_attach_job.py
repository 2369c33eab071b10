"""Whole jobs under torchrun and accelerate, attached from any PID of theirs; the same bits as without it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mxprobe.attach.distributed_job import find_job
from mxprobe.attach.process import look_up, own_processes
from mxprobe.trace import open_trace
from tests.attach_targets import MXPROBE, mxprobe, statements_in_memory, until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_machines", "1")
SCRIPT = str(Path(__file__).with_name("ddp_ranks.py"))
SCHEDULE = ("--every", "5", "--weights-every", "20")
STEPS = {2: "800", 4: "1600"}
"""By the number of ranks: on a busy machine it takes hundreds to attach and to detach again."""


@pytest.fixture(autouse=True)
def private_base(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base, f"mxprobe-{os.getuid()}")


class Job:
    """A running launcher, its ranks, and what they wrote."""

    def __init__(self, launcher: subprocess.Popen[bytes], directory: Path, n_ranks: int) -> None:
        self.launcher = launcher
        self.pid = str(launcher.pid)
        self.n_ranks = n_ranks
        self._directory = directory

    def losses(self, rank: int) -> list[str]:
        path = self._directory / f"losses.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def all_losses(self) -> list[list[str]]:
        return [self.losses(rank) for rank in range(self.n_ranks)]

    @property
    def pids(self) -> list[int]:
        return [int((self._directory / f"pid.{rank}").read_text()) for rank in range(self.n_ranks)]

    def wait_for_steps(self, count: int) -> None:
        goal = max(map(len, self.all_losses)) + count
        until(lambda: min(map(len, self.all_losses)) >= goal, timeout_s=120)

    def wait_for_end(self) -> None:
        until(lambda: all(lines and lines[-1].startswith("end ") for lines in self.all_losses), timeout_s=180)


@contextmanager
def launched(
    directory: Path, launcher: Sequence[str], n_ranks: int, *arguments: str, prefix: Sequence[str] = ()
) -> Generator[Job]:
    """Killed at the end, with whatever it started: gloo's threads can hang the exit of torch itself."""
    directory.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*prefix, *launcher, SCRIPT, str(directory), *arguments]
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    job = Job(process, directory, n_ranks)
    try:
        until(lambda: min(map(len, job.all_losses)) > 3 or process.poll() is not None, timeout_s=120)
        assert process.poll() is None, (directory / "log").read_text()
        yield job
    finally:
        for each in own_processes():
            if str(directory) in each.command_line:
                os.kill(each.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def facts_of(trace: Path) -> dict[str, Any]:
    return json.loads((trace / "run.json").read_text())


def test_every_rank_is_found_from_any_pid_of_the_job(tmp_path: Path) -> None:
    """Data loader workers inherit the environment of their rank, and are none."""
    with launched(tmp_path / "job", (*TORCHRUN, "--nproc-per-node=2"), 2, "0", "--workers", "2") as job:
        ranks = dict(enumerate(job.pids))
        workers = until(lambda: [p.pid for p in own_processes() if p.parent_pid == ranks[1]])
        for pid in (job.launcher.pid, *ranks.values(), workers[0]):
            found = find_job(pid)
            assert {rank: process.pid for rank, process in found.ranks.items()} == ranks
            assert (found.world_size, found.local_world_size, found.is_whole) == (2, 2, True)


def identical_to_control(tmp_path: Path, n_ranks: int) -> None:
    launcher, steps = (*TORCHRUN, f"--nproc-per-node={n_ranks}"), STEPS[n_ranks]
    trace = tmp_path / "a.mxprobe"
    with launched(tmp_path / "attached", launcher, n_ranks, steps) as job:
        done = mxprobe("attach", "--job", job.pid, "-o", str(trace), "--background", *SCHEDULE, timeout_s=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{trace}\n"
        job.wait_for_steps(30)

        status = json.loads(mxprobe("status", "--json", "--job", job.pid).stdout)
        assert [each["rank"] for each in sorted(status, key=lambda each: each["pid"])] == list(range(n_ranks))
        assert {each["directory"] for each in status} == {str(trace)}

        done = mxprobe("detach", "--job", str(job.pids[-1]), timeout_s=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{trace}\n"
        assert [statements_in_memory(pid) for pid in job.pids] == [0] * n_ranks
        before_end = min(map(len, job.all_losses))
        job.wait_for_end()
        seen = job.all_losses
    assert before_end < int(steps), "the job ended before it was detached; nothing after it was seen"
    with launched(tmp_path / "control", launcher, n_ranks, steps, "--pause-s", "0") as control:
        control.wait_for_end()
        assert control.all_losses == seen

    facts = facts_of(trace)
    assert [rank["rank"] for rank in facts["ranks"]] == list(range(n_ranks))
    assert [rank["pid"] for rank in facts["ranks"]] == job.pids
    for rank in facts["ranks"]:
        assert (rank["mechanism"], rank["role"], rank["ended"]["reason"]) == ("ptrace", "trainer", "detached")
        assert rank["attach_latency_ms"] > rank["pause_ms"] > 0
        assert rank["agent"]["n_errors"] == 0
    assert (facts["job"]["world_size"], facts["job"]["ranks_here"]) == (n_ranks, list(range(n_ranks)))
    assert facts["target"]["pid"] == job.pids[0]
    opened = open_trace(trace)
    assert opened.is_complete
    assert opened.problems == []
    tensors = opened.tensors()
    assert set(tensors["rank"]) == set(range(n_ranks))
    assert len({frozenset(set(rows.module)) for _, rows in tensors.groupby("rank")}) == 1
    modules = opened.modules()
    assert set(modules["rank"]) == set(range(n_ranks))


def test_two_ranks_of_ddp(tmp_path: Path) -> None:
    identical_to_control(tmp_path, 2)


@pytest.mark.slow
def test_four_ranks_of_ddp(tmp_path: Path) -> None:
    identical_to_control(tmp_path, 4)


def test_a_rank_that_cannot_be_attached_does_not_stop_the_others(tmp_path: Path) -> None:
    """Rank 1 is held by another debugger."""
    hold = (
        "import sys, time\nfrom mxprobe.attach.ptrace import Tracee\n"
        "tracee = Tracee(int(sys.argv[1]))\nprint('up', flush=True)\ntime.sleep(120)\n"
    )
    trace = tmp_path / "a.mxprobe"
    with launched(tmp_path / "job", (*TORCHRUN, "--nproc-per-node=2"), 2, "0") as job:
        command = [sys.executable, "-c", hold, str(job.pids[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as debugger:
            assert debugger.stdout is not None
            assert debugger.stdout.readline() == "up\n"
            arguments = ("attach", *map(str, job.pids), "-o", str(trace), "--duration", "1", *SCHEDULE)
            done = mxprobe(*arguments, timeout_s=120)
            debugger.kill()
        assert done.returncode == 0, done.stderr
        assert f"{job.pids[1]}: Process {job.pids[1]} is already traced by process {debugger.pid}." in done.stderr
        assert f"{job.pids[0]}: detached after the time asked for" in done.stderr
        facts = facts_of(trace)
        assert [rank["rank"] for rank in facts["ranks"]] == [0]
        assert [(each["pid"], each["reason"]) for each in facts["refused"]] == [(job.pids[1], "being_traced")]
        assert open_trace(trace).is_complete
        job.wait_for_steps(5)
        assert job.launcher.poll() is None


def test_none_of_several(tmp_path: Path) -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        done = mxprobe("attach", *(str(child.pid) for child in children), "-o", str(tmp_path / "a"))
        assert done.returncode == 4
        assert "None of the 2 processes could be attached." in done.stderr
        assert done.stderr.count("is not a CPython interpreter") == 2
        assert not (tmp_path / "a").exists()
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_no_job() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        done = mxprobe("attach", "--job", str(child.pid))
        assert done.returncode == 4
        assert "belongs to no distributed job" in done.stderr
    finally:
        child.kill()
        child.wait()
    assert mxprobe("attach", "--job", str(child.pid)).returncode == 4


def test_a_job_started_by_run_is_entered_through_the_listeners_of_its_ranks(tmp_path: Path) -> None:
    launcher, trace = (*TORCHRUN, "--nproc-per-node=2"), tmp_path / "a.mxprobe"
    with launched(tmp_path / "job", launcher, 2, "0", prefix=[*MXPROBE, "run", "-o", str(trace), "--"]) as job:
        until(lambda: (trace / "run.json").exists() and len(facts_of(trace)["ranks"]) == 2, timeout_s=90)
        job.wait_for_steps(60)
        assert len(find_job(look_up(job.launcher.pid).pid).ranks) == 2
        done = mxprobe("detach", "--job", job.pid, timeout_s=120)
        assert done.returncode == 0, (trace / "mxprobe.log").read_text()
    ranks = facts_of(trace)["ranks"]
    assert [(rank["rank"], rank["mechanism"], rank["pause_ms"]) for rank in ranks] == [
        (0, "listener", 0.0),
        (1, "listener", 0.0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ("--fsdp2",)], ids=["ddp", "fsdp2"])
def test_every_rank_switches_its_recipe_at_the_same_step(kind: tuple[str, ...], tmp_path: Path) -> None:
    """`mxprobe set --job` on a live job is the script that emulates from that step on, on each rank, bit for bit."""
    launcher, trace = (*TORCHRUN, "--nproc-per-node=2"), tmp_path / "a.mxprobe"
    with launched(tmp_path / "attached", launcher, 2, "0", *kind) as job:
        done = mxprobe("attach", "--job", job.pid, "-o", str(trace), "--background", "--every", "1000", timeout_s=180)
        assert done.returncode == 0, done.stderr
        job.wait_for_steps(3)
        done = mxprobe("set", str(job.pids[0]), "--recipe", "paper", timeout_s=180)
        assert done.returncode == 4
        assert "one rank alone must not train under another recipe" in done.stderr
        done = mxprobe("set", "--job", job.pid, "--recipe", "paper", timeout_s=180)
        assert done.returncode == 0, done.stderr
        steps = {int(step) for step in re.findall(r"from step (\d+) on", done.stdout)}
        assert (len(steps), done.stdout.count("not emulated -> paper")) == (1, 2), done.stdout
        job.wait_for_steps(10)
        done = mxprobe("detach", "--job", job.pid, timeout_s=180)
        assert done.returncode == 0, done.stderr
        (tmp_path / "attached" / "stop").touch()
        job.wait_for_end()
        seen = job.all_losses
    order = f"{steps.pop() - 1}=paper"
    arguments = (str(len(seen[0]) - 1), *kind, "--pause-s", "0")
    with launched(tmp_path / "by_hand", launcher, 2, *arguments, "--order", order) as by_hand:
        by_hand.wait_for_end()
        assert by_hand.all_losses == seen
    with launched(tmp_path / "control", launcher, 2, *arguments) as control:
        control.wait_for_end()
        assert control.all_losses != seen
    assert list(open_trace(trace).events().query("kind == 'emulation'")["rank"]) == [0, 1]


@pytest.mark.slow
def test_accelerate_launch_of_two_and_of_one(tmp_path: Path) -> None:
    for n_ranks in (2, 1):
        trace = tmp_path / f"{n_ranks}.mxprobe"
        launcher = (*ACCELERATE, "--num_processes", str(n_ranks), "--multi_gpu" if n_ranks > 1 else "--cpu")
        script = () if n_ranks > 1 else ("--pause-s", "0.01")
        prefix = [*MXPROBE, "run", "--"]
        with launched(tmp_path / f"job{n_ranks}", launcher, n_ranks, "0", *script, prefix=prefix) as job:
            done = mxprobe("attach", "--job", job.pid, "-o", str(trace), "--duration", "1", *SCHEDULE, timeout_s=120)
            assert done.returncode == 0, done.stderr
        ranks = facts_of(trace)["ranks"]
        assert [rank["pid"] for rank in ranks] == job.pids
        assert {rank["mechanism"] for rank in ranks} == {"listener"}
