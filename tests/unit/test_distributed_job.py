"""Which processes are the ranks of a job, told from environments and parents alone."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mxprobe.attach import distributed_job as jobs
from mxprobe.attach.distributed_job import is_launcher, job_among
from mxprobe.attach.process import Process, look_up, own_processes
from mxprobe.errors import AttachError

ME = look_up(os.getpid())


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    """These processes exist only here: what is no Python says so by its name."""
    monkeypatch.setattr(jobs, "is_python", lambda process: process.command_line[0] == "python")


def process(pid: int, parent: int, command: str, *, start: int = 0, **environ: str) -> Process:
    return replace(
        ME,
        pid=pid,
        parent_pid=parent,
        start_ticks=start or pid,
        command_line=tuple(command.split()),
        environ=environ,
    )


def rank(pid: int, parent: int, number: int, command: str = "python train.py", *, port: str = "29500") -> Process:
    names = {"RANK": str(number), "MASTER_PORT": port, "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"}
    return process(pid, parent, command, WORLD_SIZE="16", LOCAL_WORLD_SIZE="2", **names)


TORCHRUN = [
    process(10, 1, "bash run.sh"),
    process(11, 10, "python torchrun train.py"),
    rank(20, 11, 8),
    rank(21, 11, 9, "bash wrapper.sh"),
    rank(22, 21, 9),
    rank(30, 20, 8),  # a data loader worker
    rank(31, 22, 9, "python -c from torch._inductor.compile_worker"),
    rank(5, 1, 9, port="29501"),  # another job
    process(40, 1, "python other.py"),
]


@pytest.mark.parametrize("pid", [10, 11, 20, 21, 22, 30, 31])
def test_all_pids_of_a_job_lead_to_its_ranks(pid: int) -> None:
    start = next(p for p in TORCHRUN if p.pid == pid)
    found = job_among(list(reversed(TORCHRUN)), start)
    assert {number: p.pid for number, p in found.ranks.items()} == {8: 20, 9: 22}
    assert list(found.ranks) == [8, 9]
    assert found.to_json() == {"run_id": "none", "world_size": 16, "ranks_here": [8, 9]}
    assert found.is_whole


def test_a_rank_that_is_not_there_yet() -> None:
    found = job_among([p for p in TORCHRUN if p.pid not in (21, 22, 31)], TORCHRUN[1])
    assert list(found.ranks) == [8]
    assert not found.is_whole


def test_a_child_that_started_in_the_same_tick_is_later_by_its_pid() -> None:
    twins = [replace(p, start_ticks=7) for p in (rank(20, 11, 0), rank(30, 20, 0))]
    assert job_among(twins, twins[1]).ranks[0].pid == 20


def test_one_process_launched_without_a_rank() -> None:
    launcher = process(50, 1, "python accelerate launch train.py")
    script = process(51, 50, "python train.py")
    worker = process(52, 51, "python train.py")
    found = job_among([launcher, script, worker], launcher)
    assert {number: p.pid for number, p in found.ranks.items()} == {0: 51}


@pytest.mark.parametrize(
    "processes",
    [
        [process(50, 1, "python train.py")],
        [process(50, 1, "python train.py"), process(51, 50, "python train.py")],
        [process(50, 1, "python train.py"), process(51, 50, "python -c from multiprocessing.spawn import main")],
        [process(50, 1, "bash run.sh"), process(51, 50, "python train.py")],
        [process(50, 1, "python a.py"), process(51, 50, "python b.py"), process(52, 50, "python c.py")],
    ],
)
def test_no_job(processes: list[Process]) -> None:
    with pytest.raises(AttachError) as error:
        job_among(processes, processes[0])
    assert error.value.reason == "no_job"


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("torchrun --standalone train.py", True),
        ("/opt/venv/bin/accelerate launch train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python3 -u -m accelerate.commands.launch train.py", True),
        ("python train.py -o torchrun", False),
        ("python -m my.train", False),
    ],
)
def test_launchers(command: str, launches: bool) -> None:
    assert is_launcher(command.split()) is launches


def test_beside_the_ranks_are_the_programs_that_pid_names_or_has_started() -> None:
    processes = [
        process(1, 0, "init"),
        process(5, 1, "python notebook.py"),
        process(10, 5, "python driver.py"),
        process(11, 10, "python /usr/bin/torchrun train.py"),
        rank(20, 11, 0),
        rank(30, 20, 0),  # a data loader worker
        process(31, 20, "python engine.py"),
        process(12, 10, "python logger.py"),
        process(13, 10, "python driver.py"),  # a fork
        process(14, 10, "python -c from multiprocessing.resource_tracker import main"),
        process(15, 10, "tensorboard"),
        process(6, 5, "python other.py"),
    ]
    by_pid = {p.pid: p for p in processes}

    def beside(pid: int) -> list[int]:
        return [p.pid for p in job_among(processes, by_pid[pid]).beside]

    assert beside(10) == [10, 12]
    assert beside(11) == beside(20) == beside(30) == []


def test_this_process_is_among_its_users() -> None:
    assert ME.pid in [p.pid for p in own_processes()]
