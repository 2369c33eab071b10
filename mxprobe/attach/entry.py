"""How the agent gets into a process: through its own listener if it has one, else by the injector."""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxprobe
from mxprobe.attach.elf import ImageError, find_python, read_maps
from mxprobe.attach.injector import FUNCTIONS
from mxprobe.attach.pages import Page
from mxprobe.attach.payload import boot_statement
from mxprobe.attach.process import Process, check_attachable
from mxprobe.attach.refusals import refuse
from mxprobe.attach.rundir import RunDirectory, listener_socket_of
from mxprobe.errors import AttachError
from mxprobe.listener import peer_of
from mxprobe.protocol import ProtocolError, recv_frame, send_frame

_CONNECT_TIMEOUT_S = 15.0
_INJECTOR_TIMEOUT_S = 60.0


QUEUEING = frozenset({"ptrace"})
"""Mechanisms that map a page for their statement and queue it; the interpreter runs such calls in order."""


@dataclass(frozen=True)
class Entry:
    """How it got in: `listener` or `ptrace`, and for how long the main thread was stopped for it."""

    mechanism: str
    pause_ms: float


def enter(process: Process, run_directory: RunDirectory, token: str, *, via: str | None = None) -> Entry:
    """Hand the agent over. AttachError with the reason where neither way is open.

    Returning means that the process was asked; that the agent runs is known from its hello alone.
    """
    path = listener_socket_of(process)
    if path is not None and _knock(path, process, run_directory, token):
        return Entry("listener", 0.0)
    check_ptrace(process)
    if not run_directory.visible_to(process):
        raise refuse("other_mount_namespace", process.pid, str(run_directory.path))
    return Entry("ptrace", _inject(process, run_directory, token))


def check_reachable(process: Process) -> None:
    """Raise the AttachError that is certain already, before anything is imported, written or started for it."""
    check_attachable(process)
    if listener_socket_of(process) is None:
        check_ptrace(process)


def check_ptrace(process: Process) -> None:
    """Raise the AttachError that the injector would end in, as far as /proc tells beforehand."""
    machine = platform.machine()
    if sys.platform != "linux" or machine != "x86_64":
        raise refuse("unsupported_architecture", process.pid, f"{platform.system()} on {machine}")
    if process.tracer_pid:
        raise refuse("being_traced", process.pid, str(process.tracer_pid))
    try:
        find_python(process.pid, read_maps(process.pid), FUNCTIONS)
    except ImageError as error:
        raise refuse(error.reason, process.pid, error.detail) from None
    except PermissionError as error:
        raise not_permitted(process.pid, str(error)) from None
    except OSError:
        raise refuse("exited", process.pid, "just now") from None


def not_permitted(pid: int, detail: str) -> AttachError:
    """The kernel said no: Yama's policy if that explains it, else capabilities or a non-dumpable process."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    return refuse("ptrace_scope", pid, str(scope)) if scope else refuse("not_permitted", pid, detail)


def run_injector(process: Process, statement: str) -> dict[str, Any]:
    """Queue the statement through a helper process; returns what it measured. AttachError if it could not.

    The helper is not stopped by the caller's Ctrl-C, and not given up before it has let go of the process.
    """
    return _run_helper(process, [], statement)


def unmap_statements(process: Process, pages: list[Page]) -> dict[str, Any]:
    """Unmap pages whose statements have run; returns what the helper measured. AttachError if it could not."""
    return _run_helper(process, [f"{address}:{size_bytes}" for address, size_bytes in pages], "")


def _run_helper(process: Process, arguments: list[str], statement: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "mxprobe.attach.injector", str(process.pid), str(process.start_ticks)]
    environ = dict(os.environ, PYTHONPATH=str(Path(mxprobe.__file__).parent.parent))
    environ.pop("MXPROBE_LISTEN", None)
    done = subprocess.run(
        [*command, *arguments],
        input=statement,
        capture_output=True,
        text=True,
        env=environ,
        start_new_session=True,
        timeout=_INJECTOR_TIMEOUT_S,
        check=False,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        detail = f"the injector ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        raise refuse("injection_failed", process.pid, detail) from None
    if "reason" not in answer:
        return answer
    if answer["reason"] == "not_permitted":
        raise not_permitted(process.pid, answer["detail"])
    raise refuse(answer["reason"], process.pid, answer["detail"])


def _inject(process: Process, run_directory: RunDirectory, token: str) -> float:
    statement = boot_statement(str(run_directory.control_socket), str(run_directory.archive), token, process.inner_pid)
    answer = run_injector(process, statement)
    run_directory.page_record.add((answer["page"], answer["size_bytes"]))
    return float(answer["pause_ms"])


def _knock(path: Path, process: Process, run_directory: RunDirectory, token: str) -> bool:
    """Ask the job's listener. False where nobody (or somebody else) answers: then the injector is tried."""
    request = {
        "verb": "connect",
        "socket": str(run_directory.control_socket),
        "archive": str(run_directory.archive),
        "token": token,
    }
    started = time.monotonic()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(str(path))
            if peer_of(connection)[0] != process.pid:
                return False
            send_frame(connection, request)
            answer = recv_frame(connection)
    except TimeoutError:
        seconds = time.monotonic() - started
        raise refuse("no_ack", process.pid, "holding the interpreter in native code", seconds=seconds) from None
    except (OSError, ProtocolError):
        return False
    if answer is not None and answer["verb"] == "failed":
        raise refuse(str(answer.get("reason")), process.pid, str(answer.get("detail", "")))
    return answer is not None
