"""The ranks of a distributed job on this machine, found from the PID of any of them or of its launcher.

torchrun and accelerate put RANK, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID into the environment of each
rank. Whatever a rank starts (data loader workers, compile workers) inherits them; the rank itself is the Python
process with that RANK which was started first.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxprobe.attach.process import Process, interpreter_options, is_python, look_up, own_processes
from mxprobe.attach.refusals import refuse

_KEY = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = frozenset({"torchrun", "accelerate"})
_LAUNCHER_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_HELPERS = ("from multiprocessing", "torch._inductor.compile_worker")


@dataclass(frozen=True)
class Job:
    """`ranks` are those on this machine, by number. The job has `world_size` ranks, `local_world_size` of them here."""

    ranks: dict[int, Process]
    world_size: int | None
    local_world_size: int | None
    run_id: str
    beside: tuple[Process, ...] = ()
    """Python programs of the job that are no rank: a driver that started the launcher, a logger beside it."""

    @property
    def is_whole(self) -> bool:
        """True once every rank of this machine is there."""
        return self.local_world_size is None or len(self.ranks) >= self.local_world_size

    def to_json(self) -> dict[str, object]:
        return {"run_id": self.run_id, "world_size": self.world_size, "ranks_here": sorted(self.ranks)}


def find_job(pid: int) -> Job:
    """Return the job of that process. AttachError `no_such_process`, or `no_job` if there is none (yet)."""
    return job_among(own_processes(), look_up(pid))


def is_launcher(command: Sequence[str]) -> bool:
    """Return True for a command that starts the ranks of a job: torchrun or accelerate, by program or by module."""
    if any(os.path.basename(word) in _LAUNCHERS for word in command[:2]):
        return True
    module = dict(interpreter_options(command)).get("-m", "")
    return module in _LAUNCHER_MODULES or module.startswith("accelerate.")


def job_among(processes: Sequence[Process], process: Process) -> Job:
    """Return the job of a process among those given. AttachError `no_job` if there is none."""
    below = _descendants(processes, process.pid)
    key = next((key for p in (process, *below) if (key := _key(p.environ)) is not None), None)
    if key is None:
        return _of_one(process, below)
    ranks: dict[int, Process] = {}
    for candidate in sorted(processes, key=lambda p: (p.start_ticks, p.pid)):
        rank = candidate.environ.get("RANK", "")
        if _key(candidate.environ) == key and int(rank) not in ranks and is_python(candidate):
            ranks[int(rank)] = candidate
    if not ranks:
        raise refuse("no_job", process.pid)
    environ = next(iter(ranks.values())).environ
    return Job(
        ranks=dict(sorted(ranks.items())),
        world_size=_number(environ, "WORLD_SIZE"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE"),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        beside=_beside(processes, process, list(ranks.values())),
    )


def _beside(processes: Sequence[Process], process: Process, ranks: Sequence[Process]) -> tuple[Process, ...]:
    """Return the named program and what it has started, where that is Python and neither rank nor launcher.

    What a rank starts is its own business: data loaders, compile workers, inference engines.
    """
    below_ranks = {p.pid for rank in ranks for p in (rank, *_descendants(processes, rank.pid))}
    by_pid = {p.pid: p for p in processes}
    found: list[Process] = []
    for each in (process, *_descendants(processes, process.pid)):
        parent = by_pid.get(each.parent_pid)
        if each.pid in below_ranks or is_launcher(each.command_line) or not is_python(each):
            continue
        if parent is None or not _is_helper(each, of=parent.command_line):
            found.append(each)
    return tuple(found)


def _of_one(process: Process, below: Sequence[Process]) -> Job:
    """Return the job of `accelerate launch` of one process, which sets no RANK: the one program that was launched."""
    launched = [
        p for p in below if p.parent_pid == process.pid and is_python(p) and not _is_helper(p, of=process.command_line)
    ]
    if len(launched) != 1 or not is_python(process):
        raise refuse("no_job", process.pid)
    return Job(ranks={0: launched[0]}, world_size=1, local_world_size=1, run_id="")


def _is_helper(process: Process, *, of: tuple[str, ...]) -> bool:
    """Return True for a fork of its parent and for the servers that multiprocessing and torch start."""
    words = " ".join(process.command_line)
    return process.command_line == of or any(helper in words for helper in _HELPERS)


def _key(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    if not environ.get("RANK", "").isdecimal() or not environ.get("MASTER_PORT"):
        return None
    return tuple(environ.get(name, "") for name in _KEY)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _descendants(processes: Iterable[Process], pid: int) -> list[Process]:
    """Return every process below that one, parents first."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent_pid, []).append(process)
    found: list[Process] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(0), [])
        found += below
        pending += [p.pid for p in below]
    return found
