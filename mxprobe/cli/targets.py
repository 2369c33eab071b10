"""The processes that a command is about: those named, or with `--job` every rank of the job they belong to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from mxprobe.errors import AttachError

if TYPE_CHECKING:
    from mxprobe.attach.distributed_job import Job
    from mxprobe.attach.process import Process

_LOOK_EVERY_S = 0.5

argument = click.argument("pids", metavar="PID...", type=click.IntRange(min=1), nargs=-1)
job_option = click.option("--job", is_flag=True, help="Every attached rank, on this machine, of the job of PID.")


@dataclass(frozen=True)
class Targets:
    """Name (`rank 3`, or the PID) -> process. `job` is what they have in common, for `run.json`."""

    processes: dict[str, Process]
    job: dict[str, Any] | None = None
    perhaps: frozenset[int] = frozenset()
    """PIDs of processes that are meant only if they train or log."""
    beside: frozenset[int] = frozenset()
    """PIDs of processes that are no rank of the job."""
    nodes: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])
    """PIDs by node of a Ray cluster that has actors on other machines too; then there are no `processes`."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes.values()]


def require(pids: tuple[int, ...]) -> None:
    """Raise what click raises where no PID was given."""
    if not pids:
        raise click.UsageError("Missing argument 'PID...'.")


def named(pids: tuple[int, ...], *, job: bool) -> list[int]:
    """Return the PIDs, or with `job` those of all ranks of their jobs. At least one PID is required."""
    require(pids)
    return list(pids) if not job else look_up_all(pids, job=True).pids


def ask(pid: int, verb: str, *, timeout_s: float, **members: Any) -> dict[str, Any] | None:
    """Return the answer of the controller that is attached to the process; None where there is none."""
    from mxprobe.attach import client
    from mxprobe.attach.rundir import control_socket_of

    control_socket = control_socket_of(pid)
    return None if control_socket is None else client.ask(control_socket, verb, timeout_s=timeout_s, **members)


def not_attached(
    what: str,
    *,
    cause: str = "it never was, it was detached already, or another user attached to it",
    remedy: str = "`mxprobe status` lists what is attached",
) -> AttachError:
    return AttachError("not_attached", what, cause=cause, remedy=remedy)


def look_up_all(
    pids: tuple[int, ...], *, job: bool, wait_s: float = 0.0, say: Callable[[str], None] = lambda text: None
) -> Targets:
    """Return the processes of the PIDs, or of their jobs once these are whole. AttachError where there is none."""
    from mxprobe.attach.process import look_up

    if not job:
        return Targets({str(pid): look_up(pid) for pid in dict.fromkeys(pids)})
    found: dict[str, Process] = {}
    beside: dict[str, Process] = {}
    facts: list[dict[str, Any]] = []
    for pid in pids:
        each = _job(pid, wait_s, say)
        prefix = f"{pid}: " if len(pids) > 1 else ""
        new = {f"{prefix}rank {rank}": p for rank, p in each.ranks.items() if p not in found.values()}
        if new:
            found |= new
            facts.append(each.to_json())
            beside |= {f"{prefix}beside {p.pid}": p for p in each.beside if p not in beside.values()}
    others = frozenset(process.pid for process in beside.values())
    return Targets({**found, **beside}, facts[0] if len(facts) == 1 else {"jobs": facts}, perhaps=others, beside=others)


def look_up_ray(address: str, say: Callable[[str], None]) -> Targets:
    """Return the actors of a Ray cluster. UsageError without a cluster, AttachError without an actor."""
    from mxprobe.attach.process import look_up
    from mxprobe.attach.ray_cluster import find_actors

    actors = find_actors(address)
    everyone = (*actors.here, *actors.elsewhere)
    facts: dict[str, Any] = {"ray": address, "actors": {actor.pid: actor.class_name for actor in everyone}}
    if actors.elsewhere:
        say(f"Ray cluster at {address}: {len(everyone)} actors on {len(actors.nodes)} nodes")
        return Targets({}, facts, nodes=actors.nodes)
    say(f"Ray cluster at {address}: {len(actors.here)} actors on this machine")
    found: dict[str, Process] = {}
    for actor in actors.here:
        with suppress(AttachError):  # it ended meanwhile
            found[f"{actor.class_name} {actor.pid}"] = look_up(actor.pid)
    if not found:
        raise AttachError(
            "no_actor",
            f"The Ray cluster at {address} has no actor.",
            cause="the job has not created its actors yet, or it trains in its driver",
            remedy="wait until it trains; a driver is a process like any other: `mxprobe attach PID`, where it runs",
        )
    return Targets(found, facts, perhaps=frozenset(p.pid for p in found.values()))


def _job(pid: int, wait_s: float, say: Callable[[str], None]) -> Job:
    from mxprobe.attach.distributed_job import find_job

    deadline = time.monotonic() + wait_s
    while True:
        late = time.monotonic() >= deadline
        try:
            job = find_job(pid)
            if job.is_whole or late:
                break
        except AttachError as error:
            if error.reason != "no_job" or late:
                raise
        time.sleep(_LOOK_EVERY_S)
    here = f"{len(job.ranks)} rank{'' if len(job.ranks) == 1 else 's'} on this machine"
    if job.world_size is not None and job.world_size > len(job.ranks):
        here += f", of {job.world_size}; attach to the others where they run"
    if job.beside:
        here += f"; {len(job.beside)} beside them, for their metrics if they log any"
    say(f"job of process {pid}: {here}")
    return job
