"""The ways by which the agent gets into a process. The first that is open is taken, in this order:

    listener      the job's own socket, where it has one
    remote_exec   `sys.remote_exec`, where the target is Python 3.14 or newer
    ptrace        our injector, on x86_64
    gdb           the same by gdb, on other machines

Each of them hands over the same statement. Only the agent's hello tells that it runs.
"""

import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxprobe.attach import gdb, remote_exec
from mxprobe.attach.client import exchange
from mxprobe.attach.injector_process import check_ptrace, run_injector, unmap_statements
from mxprobe.attach.page_record import Page
from mxprobe.attach.payload import boot_statement
from mxprobe.attach.process import Process, check_attachable
from mxprobe.attach.refusals import refuse
from mxprobe.attach.rundir import RunDirectory, listener_socket_of
from mxprobe.errors import AttachError

_CONNECT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Entry:
    """How the agent got in, and for how long the main thread (with gdb: every thread) was stopped for it."""

    mechanism: str
    pause_ms: float
    leaves_page: bool = False
    """True where the process maps a page for the statement, and runs such statements in the order they came."""


def enter(process: Process, run_directory: RunDirectory, token: str, *, via: str | None = None) -> Entry:
    """Hand the agent over, by the first way that is open or by `via` alone. AttachError with the reason if none is.

    When this returns, the process has been asked.
    """
    if via in (None, "listener"):
        path = listener_socket_of(process)
        if path is not None and _knock(path, process, run_directory, token):
            return Entry("listener", 0.0)
        if via is not None:
            raise refuse("no_listener", process.pid)
    via = via or way_from_outside(process)
    _check(process, via)
    if not run_directory.visible_to(process):
        raise refuse("other_mount_namespace", process.pid, str(run_directory.path))
    statement = boot_statement(str(run_directory.control_socket), str(run_directory.archive), token, process.inner_pid)
    if via == "remote_exec":
        return _enter_by_remote_exec(process, run_directory, statement)
    return _inject(process, run_directory, statement, by_gdb=via == "gdb")


def unmap(entry: Entry, process: Process, run_directory: RunDirectory, pages: list[Page]) -> dict[str, Any]:
    """Unmap pages whose statements have run, the way they came; returns {pause_ms, unmapped}. AttachError if not."""
    if entry.mechanism == "gdb":
        return gdb.unmap(process, pages, run_directory.path)
    return unmap_statements(process, pages)


def way_from_outside(process: Process) -> str:
    """Return the first way in that needs nothing of the job."""
    if remote_exec.is_offered(process.pid) and remote_exec.interpreter_of(process) is not None:
        return "remote_exec"
    ours = sys.platform == "linux" and platform.machine() == "x86_64"
    return "ptrace" if ours or not gdb.is_here() else "gdb"


def check_reachable(process: Process, *, via: str | None = None) -> None:
    """Raise the AttachError that is certain already, before anything is imported, written or started for it."""
    check_attachable(process)
    if via == "listener" or (via is None and listener_socket_of(process) is not None):
        return
    _check(process, via or way_from_outside(process))


def _check(process: Process, via: str) -> None:
    if via == "gdb":
        if not gdb.is_here():
            raise refuse("no_gdb", process.pid)
        check_ptrace(process, any_machine=True)
    elif via == "ptrace":
        check_ptrace(process)
    elif not remote_exec.is_offered(process.pid):
        raise refuse("no_remote_exec", process.pid, "not Python 3.14 or newer, or its memory cannot be read")


def _enter_by_remote_exec(process: Process, run_directory: RunDirectory, statement: str) -> Entry:
    run_directory.script.write_text(statement)
    try:
        remote_exec.run_script(process, run_directory.script)
    except AttachError as error:
        run_directory.script.unlink()
        if error.reason != "no_remote_exec":
            raise
        check_ptrace(process)
        return _inject(process, run_directory, statement)
    return Entry("remote_exec", 0.0)


def _inject(process: Process, run_directory: RunDirectory, statement: str, *, by_gdb: bool = False) -> Entry:
    answer = gdb.queue(process, statement, run_directory.path) if by_gdb else run_injector(process, statement)
    run_directory.page_record.add((answer["page"], answer["size_bytes"]))
    return Entry("gdb" if by_gdb else "ptrace", float(answer["pause_ms"]), leaves_page=True)


def _knock(path: Path, process: Process, run_directory: RunDirectory, token: str) -> bool:
    """Ask the job's listener. Return False where nobody (or somebody else) answers: then the next way is tried."""
    where = {"socket": str(run_directory.control_socket), "archive": str(run_directory.archive)}
    request = {"verb": "connect", **where, "token": token}
    started = time.monotonic()
    try:
        answer = exchange(path, request, timeout_s=_CONNECT_TIMEOUT_S, pid=process.pid)
    except TimeoutError:
        seconds = time.monotonic() - started
        raise refuse("no_ack", process.pid, "holding the interpreter in native code", seconds=seconds) from None
    if answer is not None and answer["verb"] == "failed":
        raise refuse(str(answer.get("reason")), process.pid, str(answer.get("detail", "")))
    return answer is not None
