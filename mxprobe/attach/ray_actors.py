"""The actors of a Ray cluster, as processes on its machines.

    python -m mxprobe.attach.ray_actors ADDRESS      -> one JSON object on stdout

Ray knows the PID of every actor; which of them train, only the agent can tell: an actor without torch, or one that
takes no optimizer step, refuses like any other process and is left out. Asking means to connect as a driver for a
moment, in a process of its own: Ray's threads and its patience with a cluster that does not answer stay there.
Needs the extra `ray`, in the version that the cluster runs.
"""

import json
import logging
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from mxprobe.errors import UsageError

_TIMEOUT_S = 60.0
_NO_RAY = 3


@dataclass(frozen=True)
class Actor:
    pid: int
    class_name: str
    node_id: str


@dataclass(frozen=True)
class Actors:
    """The living actors of a cluster: those on this machine's node, and those on others."""

    here: tuple[Actor, ...]
    elsewhere: tuple[Actor, ...]

    @property
    def nodes(self) -> dict[str, list[int]]:
        """PIDs by node, this machine's among them."""
        found: dict[str, list[int]] = {}
        for actor in (*self.here, *self.elsewhere):
            found.setdefault(actor.node_id, []).append(actor.pid)
        return found


def find_actors(address: str) -> Actors:
    """Ask the cluster at that address (`auto`: the one that runs here). UsageError if there is none to ask."""
    command = [sys.executable, "-m", "mxprobe.attach.ray_actors", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        code, answer = done.returncode, done.stdout
        why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    except subprocess.TimeoutExpired as expired:
        said = expired.stderr.decode(errors="replace") if expired.stderr else ""
        code, answer, why = -1, "", (said.strip().splitlines() or [f"nothing within {_TIMEOUT_S:g} s"])[-1]
    if code == _NO_RAY:
        raise UsageError(
            "attaching to a Ray cluster needs ray",
            cause="it is not installed beside mxprobe",
            remedy="pip install 'mxprobe[ray]', in the version that the cluster runs",
        )
    if code != 0:
        raise UsageError(
            f"no answer from a Ray cluster at {address}: {why}",
            cause="no cluster there, another version of Python or Ray, or it wants a token (RAY_AUTH_TOKEN)",
            remedy="run mxprobe on a node of the cluster, in the environment of its jobs, with --ray auto",
        )
    found = json.loads(answer.splitlines()[-1])
    return Actors(*(tuple(Actor(**actor) for actor in found[where]) for where in ("here", "elsewhere")))


def split(records: Any, node_id: str) -> Actors:
    """Sort Ray's records of actors by whether they live on that node; the dead are left out."""
    living = [
        Actor(int(record["Pid"]), str(record["ActorClassName"]), str(record["Address"]["NodeID"]))
        for record in records
        if record["State"] == "ALIVE" and record.get("Pid")
    ]
    living.sort(key=lambda actor: actor.pid)
    here = tuple(actor for actor in living if actor.node_id == node_id)
    return Actors(here, tuple(actor for actor in living if actor.node_id != node_id))


def main() -> int:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray._private import state  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _NO_RAY
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    # The control store rather than `ray.util.state`, which needs a dashboard.
    found = split(state.actors().values(), str(ray.get_runtime_context().get_node_id()))
    print(json.dumps(asdict(found)))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
