"""An attach to the actors of every node of a Ray cluster, recorded into one trace here.

    python -m mxprobe.attach.ray_nodes      <- one JSON line: {address, directory, nodes: {id: [pid]}, options, facts}

On each node a task of the cluster, pinned to it, attaches to the processes there (`NodeRecorder`) and keeps its share;
this process, a driver of the cluster for as long, copies the shares into one directory while they grow. It takes no CPU
of the cluster and no GPU. Lines about the nodes go to stderr. On stdout comes {"attached": true} with the first rank,
and {"codes": {node: exit code}} at the end. When its standard input ends, every node detaches in order.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxprobe.attach.mirror import Gathering
from mxprobe.attach.node_recorder import NodeRecorder
from mxprobe.errors import EXIT_ATTACH, AttachError, MxprobeError

_POLL_S = 1.0
_PATIENCE_S = 120.0
_LOST = -1


def record(
    address: str,
    directory: Path,
    nodes: Mapping[str, Sequence[int]],
    options: Sequence[str],
    facts: Mapping[str, Any],
    *,
    on_attached: Callable[[], None],
    is_over: Callable[[], bool],
) -> dict[str, int]:
    """Run it all in a process of its own; exit code of each node's attach. AttachError where none came about.

    `is_over` is asked about once a second, and every node detaches once it is true.
    """
    spec = {"address": address, "directory": str(directory), "nodes": {n: list(p) for n, p in nodes.items()}}
    spec |= {"options": list(options), "facts": dict(facts)}
    command = [sys.executable, "-m", "mxprobe.attach.ray_nodes"]
    # In a session of its own: a Ctrl-C at the terminal is ours to pass on.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(spec) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = {}
    hearing = threading.Thread(target=_hear, args=(process, answer, on_attached), daemon=True)
    hearing.start()
    while process.poll() is None:
        if is_over() and not process.stdin.closed:
            process.stdin.close()
        hearing.join(_POLL_S)
    hearing.join()
    codes: dict[str, int] = answer.get("codes", {})
    if not any(code == 0 for code in codes.values()):
        raise AttachError(
            "none_attached",
            f"None of the {len(nodes)} nodes of the Ray cluster could be attached to.",
            cause="see what was said of each",
            remedy="`mxprobe doctor` on a node says which ways in work there",
        )
    return codes


def _hear(process: subprocess.Popen[str], answer: dict[str, Any], on_attached: Callable[[], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            told = json.loads(line)
            if told.get("attached"):
                on_attached()
            answer.update(told)


class _Nodes:
    """The recorders on the nodes, and what has come of them."""

    def __init__(self, ray: Any, spec: Mapping[str, Any], gathering: Gathering) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

        self._ray = ray
        self._gathering = gathering
        self.codes: dict[str, int] = {}
        self._recorders: dict[str, Any] = {}
        for node, pids in spec["nodes"].items():
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            make = ray.remote(num_cpus=0, scheduling_strategy=where)(NodeRecorder)
            self._recorders[node] = make.remote(pids, spec["options"])

    @property
    def are_done(self) -> bool:
        return len(self.codes) == len(self._recorders)

    def _open(self) -> list[str]:
        return [node for node in self._recorders if node not in self.codes]

    def ask(self) -> None:
        """Take what is new from each that records."""
        asked = {node: self._recorders[node].news.remote(self._gathering.known(node)) for node in self._open()}
        for node, promise in asked.items():
            try:
                told = self._ray.get(promise, timeout=_PATIENCE_S)
            except Exception as error:
                self._lose(node, error)
                continue
            for line in told["said"].splitlines():
                _say(node, line)
            try:
                self._gathering.take(node, told["news"])
            except (OSError, ValueError, MxprobeError) as error:
                self._lose(node, error)
                self._recorders[node].stop.remote()
                continue
            if told["code"] is not None and told["news"].is_all:
                self.codes[node] = int(told["code"])
                self._recorders[node].clean.remote()

    def stop(self) -> None:
        for node in self._open():
            self._recorders[node].stop.remote()

    def _lose(self, node: str, error: Exception) -> None:
        """What has come of it stays."""
        self.codes[node] = _LOST
        words = str(error).strip().splitlines() or [type(error).__name__]
        why = (
            "mxprobe is not installed in the environment of its workers"
            if "No module named" in str(error)
            else words[-1]
        )
        _say(node, f"lost: {why}")


def _say(node: str, line: str) -> None:
    print(f"node {node[:8]}: {line}", file=sys.stderr, flush=True)


def main() -> int:
    import ray  # pyright: ignore[reportMissingImports]

    spec = json.loads(sys.stdin.readline())
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    try:
        gathering = Gathering(Path(spec["directory"]), spec["facts"])
    except MxprobeError as error:
        print(f"mxprobe: {error}", file=sys.stderr)
        return error.exit_code
    ray.init(address=spec["address"], log_to_driver=False, logging_level=logging.ERROR)
    attached = stopped = False
    nodes = _Nodes(ray, spec, gathering)
    try:
        while not nodes.are_done:
            nodes.ask()
            if gathering.n_ranks and not attached:
                attached = True
                print(json.dumps({"attached": True}), flush=True)
            if ended.is_set() and not stopped:
                stopped = True
                nodes.stop()
            time.sleep(0.1 if stopped else _POLL_S)
    finally:
        gathering.close()
        ray.shutdown()
    print(json.dumps({"codes": nodes.codes}), flush=True)
    return 0 if 0 in nodes.codes.values() else EXIT_ATTACH


if __name__ == "__main__":
    sys.exit(main())
