"""The actors of a Ray cluster: found, and recorded on all of its nodes into one trace here.

    python -m mxprobe.attach.ray_cluster find ADDRESS   -> one JSON line: the actors
    python -m mxprobe.attach.ray_cluster record         <- one JSON line: {address, directory, nodes, options, facts}

Ray knows the PID of every actor. Which of them train, only the agent can tell: an actor without torch, or one that
takes no optimizer step, refuses like any other process and is left out. To ask, one must connect as a driver. That
happens in a process of its own: Ray's threads, and its patience with a cluster that does not answer, stay there.

To record, a task of the cluster attaches on each node to the processes there (`NodeRecorder`) and keeps its share. The
driver copies the shares into one directory while they grow; it takes no CPU of the cluster and no GPU. Lines about the
nodes go to stderr. On stdout come {"attached": true} with the first rank, and {"codes": {node: exit code}} at the end.
When its standard input ends, every node detaches in order. Needs the extra `ray`, in the version of the cluster.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from mxprobe.attach.joined_trace import JoinedTrace
from mxprobe.attach.ray_node import NodeRecorder
from mxprobe.errors import EXIT_ATTACH, AttachError, MxprobeError, UsageError
from mxprobe.host_compat import ray_actor_records

_FIND_TIMEOUT_S = 60.0
_NO_RAY = 3
_POLL_S = 1.0
_PATIENCE_S = 120.0
_LOST = -1
_COMMAND = (sys.executable, "-m", "mxprobe.attach.ray_cluster")


class Actor(NamedTuple):
    pid: int
    class_name: str
    node_id: str


class Actors(NamedTuple):
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
    try:
        done = subprocess.run(
            [*_COMMAND, "find", address], capture_output=True, text=True, timeout=_FIND_TIMEOUT_S, check=False
        )
        code, answer, errors = done.returncode, done.stdout, done.stderr or "it ended without a word"
    except subprocess.TimeoutExpired as expired:
        said = expired.stderr.decode(errors="replace") if expired.stderr else ""
        code, answer, errors = -1, "", said or f"nothing within {_FIND_TIMEOUT_S:g} s"
    if code == _NO_RAY:
        raise UsageError(
            "attaching to a Ray cluster needs ray",
            cause="it is not installed beside mxprobe",
            remedy="pip install 'mxprobe[ray]', in the version that the cluster runs",
        )
    if code != 0:
        raise UsageError(
            f"no answer from a Ray cluster at {address}: {errors.strip().splitlines()[-1]}",
            cause="no cluster there, another version of Python or Ray, or it wants a token (RAY_AUTH_TOKEN)",
            remedy="run mxprobe on a node of the cluster, in the environment of its jobs, with --ray auto",
        )
    here, elsewhere = json.loads(answer.splitlines()[-1])
    return Actors(tuple(Actor(*each) for each in here), tuple(Actor(*each) for each in elsewhere))


def split(records: Iterable[Mapping[str, Any]], node_id: str) -> Actors:
    """Sort Ray's records of actors by whether they live on that node; the dead are left out."""
    living = sorted(
        Actor(int(record["Pid"]), str(record["ActorClassName"]), str(record["Address"]["NodeID"]))
        for record in records
        if record["State"] == "ALIVE" and record.get("Pid")
    )
    here = tuple(actor for actor in living if actor.node_id == node_id)
    return Actors(here, tuple(actor for actor in living if actor.node_id != node_id))


def record(
    address: str,
    directory: Path,
    nodes: Mapping[str, Sequence[int]],
    options: Sequence[str],
    facts: Mapping[str, Any],
    *,
    on_attached: Callable[[], None],
    over: threading.Event,
) -> None:
    """Attach to PIDs by node, and record until the last attach has ended. AttachError where none came about.

    Every node detaches once `over` is set.
    """
    task = {"address": address, "directory": str(directory), "nodes": nodes, "options": options, "facts": facts}
    # In a session of its own: a Ctrl-C at the terminal is ours to pass on.
    process = subprocess.Popen(
        [*_COMMAND, "record"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    threading.Thread(target=_close_after, args=(over, process.stdin), daemon=True).start()
    codes: dict[str, int] = {}
    for line in process.stdout:
        if line.startswith("{"):
            told = json.loads(line)
            if told.get("attached"):
                on_attached()
            codes.update(told.get("codes", {}))
    process.wait()
    if 0 not in codes.values():
        raise AttachError(
            "none_attached",
            f"None of the {len(nodes)} nodes of the Ray cluster could be attached to.",
            cause="see what was said of each",
            remedy="`mxprobe doctor` on a node says which ways in work there",
        )


def _close_after(over: threading.Event, pipe: IO[str]) -> None:
    over.wait()
    with suppress(OSError):  # the process has ended by itself
        pipe.close()


class _Nodes:
    """The recorders on the nodes, and the exit code of each that has ended."""

    def __init__(self, ray: Any, task: Mapping[str, Any], joined: JoinedTrace) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

        self._ray = ray
        self._joined = joined
        self.codes: dict[str, int] = {}
        self._recorders: dict[str, Any] = {}
        for node, pids in task["nodes"].items():
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            make = ray.remote(num_cpus=0, scheduling_strategy=where)(NodeRecorder)
            self._recorders[node] = make.remote(pids, task["options"])

    @property
    def open(self) -> list[str]:
        return [node for node in self._recorders if node not in self.codes]

    def pull(self) -> None:
        """Copy what is new on each node that still records."""
        asked = {node: self._recorders[node].changes.remote(self._joined.known(node)) for node in self.open}
        for node, promise in asked.items():
            try:
                answer = self._ray.get(promise, timeout=_PATIENCE_S)
            except Exception as error:
                self._lose(node, error)
                continue
            for line in answer["log"].splitlines():
                _say(node, line)
            try:
                self._joined.apply(node, answer["changes"])
            except (OSError, ValueError, MxprobeError) as error:
                self._lose(node, error)
                self._recorders[node].stop.remote()
                continue
            if answer["code"] is not None and answer["changes"].is_all:
                self.codes[node] = int(answer["code"])
                self._recorders[node].clean.remote()

    def stop(self) -> None:
        for node in self.open:
            self._recorders[node].stop.remote()

    def _lose(self, node: str, error: Exception) -> None:
        """Give a node up. What has been copied of its trace stays."""
        self.codes[node] = _LOST
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if "No module named" in str(error):
            why = "mxprobe is not installed in the environment of its workers"
        _say(node, f"lost: {why}")


def _say(node: str, line: str) -> None:
    print(f"node {node[:8]}: {line}", file=sys.stderr, flush=True)


def _connect(ray: Any, address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _find(ray: Any, address: str) -> int:
    _connect(ray, address)
    print(json.dumps(split(ray_actor_records(), str(ray.get_runtime_context().get_node_id()))))
    ray.shutdown()
    return 0


def _record(ray: Any, task: Mapping[str, Any]) -> int:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    try:
        joined = JoinedTrace(Path(task["directory"]), task["facts"])
    except MxprobeError as error:
        print(f"mxprobe: {error}", file=sys.stderr)
        return error.exit_code
    _connect(ray, task["address"])
    attached = stopped = False
    nodes = _Nodes(ray, task, joined)
    try:
        while nodes.open:
            nodes.pull()
            if joined.n_ranks and not attached:
                attached = True
                print(json.dumps({"attached": True}), flush=True)
            if ended.is_set() and not stopped:
                stopped = True
                nodes.stop()
            time.sleep(0.1 if stopped else _POLL_S)
    finally:
        joined.close()
        ray.shutdown()
    print(json.dumps({"codes": nodes.codes}), flush=True)
    return 0 if 0 in nodes.codes.values() else EXIT_ATTACH


def main() -> int:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _NO_RAY
    return _find(ray, sys.argv[2]) if sys.argv[1] == "find" else _record(ray, json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    sys.exit(main())
