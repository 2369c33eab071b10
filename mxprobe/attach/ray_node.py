"""The attach on one node of a Ray cluster: a `mxprobe attach` of its own there, asked and ended from elsewhere.

`NodeRecorder` lives in a task of the cluster on that node; mxprobe must be installed in the environment of its workers.
The attach itself is a process of its own,

    python -m mxprobe.attach.ray_node PID... -o DIRECTORY [options of mxprobe attach]

which leaves in order when the pipe to its standard input ends: with `stop`, and when the task that held the pipe ends.
"""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxprobe.attach.joined_trace import Known, changes_since


class NodeRecorder:
    """Attaches at once to processes of the machine on which it is made."""

    def __init__(self, pids: Sequence[int], options: Sequence[str]) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="mxprobe-node-"))
        self._log = self._base / "log"
        self._trace = self._base / "part.mxprobe"
        self._n_read = 0
        arguments = [*map(str, pids), "-o", str(self._trace), *options]
        command = [sys.executable, "-m", "mxprobe.attach.ray_node", *arguments]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log)

    def changes(self, known: Known) -> dict[str, Any]:
        """Return {changes, log, code}: what is new in the trace and in the log, and the exit code once there is one."""
        code = self._process.poll()  # before the look at the trace, which is then the last
        log = self._log.read_bytes()[self._n_read :]
        self._n_read += len(log)
        return {"changes": changes_since(self._trace, known), "log": log.decode(errors="replace"), "code": code}

    def stop(self) -> None:
        """Detach in order; `changes` tells when that is done."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def clean(self) -> None:
        """Remove the trace, which has been copied."""
        shutil.rmtree(self._base, ignore_errors=True)


def _leave_with(pipe: Any) -> None:
    while pipe.read(1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # a worker of Ray hands on its mask
    threading.Thread(target=_leave_with, args=(sys.stdin.buffer,), daemon=True).start()
    sys.argv[1:1] = ["attach"]
    runpy.run_module("mxprobe", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
