"""One machine's share of an attach to a cluster: a `mxprobe attach` of its own there, told of and ended from afar.

`NodeRecorder` lives in a task of the cluster on that machine; mxprobe must be installed in the environment of its
workers. The attach itself is a process of its own,

    python -m mxprobe.attach.node_recorder PID... -o DIRECTORY [options of mxprobe attach]

which leaves, in order, when the pipe to its standard input ends: with `stop`, and with whoever held it.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxprobe.attach.mirror import Known, news_of


class NodeRecorder:
    """Attaches to processes of the machine it is made on, at once."""

    def __init__(self, pids: Sequence[int], options: Sequence[str]) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="mxprobe-node-"))
        self._log = self._base / "log"
        self._n_said = 0
        command = [
            sys.executable,
            "-m",
            "mxprobe.attach.node_recorder",
            *map(str, pids),
            "-o",
            str(self._trace),
            *options,
        ]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log)

    @property
    def _trace(self) -> Path:
        return self._base / "part.mxprobe"

    def news(self, known: Known) -> dict[str, Any]:
        """{news, said, code}: what is new of the trace, lines of the log, and the exit code once there is one."""
        code = self._process.poll()  # before the look at the trace, which is then the last
        said = self._log.read_bytes()[self._n_said :]
        self._n_said += len(said)
        return {"news": news_of(self._trace, known), "said": said.decode(errors="replace"), "code": code}

    def stop(self) -> None:
        """Detach in order; `news` tells when that is done."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def clean(self) -> None:
        """The trace has been copied."""
        shutil.rmtree(self._base, ignore_errors=True)


def _leave_with(pipe: Any) -> None:
    while pipe.read(1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    from mxprobe.cli import main as mxprobe

    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # a worker of Ray hands on its mask
    threading.Thread(target=_leave_with, args=(sys.stdin.buffer,), daemon=True).start()
    sys.argv[1:1] = ["attach"]
    mxprobe()


if __name__ == "__main__":
    main()
