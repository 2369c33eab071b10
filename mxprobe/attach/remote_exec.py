"""`sys.remote_exec` (PEP 768, Python 3.14 and newer), called by the target's own interpreter. Nothing is stopped.

The call needs the very version that the target runs. So a short-lived process of the target's own executable makes it,
isolated from any environment. The target reads the script from disk at its next safe point and runs it. The script
must be there until the agent's hello; one that runs late finds nothing to connect to.

Not tested against a live 3.14 in this repository: what is tested is when this way is taken and how it refuses.
"""

import os
import struct
import subprocess
from pathlib import Path

from mxprobe.attach.elf import ImageError, find_python, read_maps
from mxprobe.attach.process import Process
from mxprobe.attach.refusals import refuse
from mxprobe.errors import AttachError

FIRST_VERSION = 0x030E0000
_TIMEOUT_S = 30.0
_CALL = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
# How the interpreter says no, in the last line of its traceback -> the refusal's slug.
_REFUSALS = (
    ("Remote debugging is not enabled", "remote_debugging_disabled"),
    ("PermissionError", "not_permitted"),
    ("Operation not permitted", "not_permitted"),
    ("ProcessLookupError", "exited"),
)


def version_of(pid: int) -> int | None:
    """Return the interpreter's `sys.hexversion` from its memory; None below 3.11 and where it cannot be read."""
    try:
        address = find_python(pid, read_maps(pid), ("Py_Version",), machine=None).addresses["Py_Version"]
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return int(struct.unpack("<Q", os.pread(memory.fileno(), 8, address))[0])
    except (ImageError, OSError, struct.error):
        return None


def is_offered(pid: int) -> bool:
    version = version_of(pid)
    return version is not None and version >= FIRST_VERSION


def run_script(process: Process, script: Path) -> None:
    """Have the process run the script. AttachError `no_remote_exec` where its interpreter cannot be started here,
    or the refusal that the interpreter itself gives."""
    interpreter = interpreter_of(process)
    if interpreter is None:
        raise refuse("no_remote_exec", process.pid, "its interpreter is not on this file system")
    command = [interpreter, "-I", "-S", "-c", _CALL, str(process.pid), str(script)]
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
    try:
        done = subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise refuse("no_remote_exec", process.pid, str(error)) from None
    if done.returncode:
        raise refusal_in(process.pid, done.stderr)


def interpreter_of(process: Process) -> str | None:
    """Return a path at which this very executable can be started here; None in another file system."""
    link = f"/proc/{process.pid}/exe"
    try:
        path = os.readlink(link)
        return path if os.path.samefile(path, link) else None
    except OSError:
        return None


def refusal_in(pid: int, traceback: str) -> AttachError:
    """Return the refusal that the interpreter's traceback stands for."""
    last = (traceback.strip().splitlines() or ["it ended without a word"])[-1]
    for words, reason in _REFUSALS:
        if words in traceback:
            return refuse(reason, pid, last)
    return refuse("no_remote_exec", pid, last)
