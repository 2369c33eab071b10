"""Finds the trace directory of what the user named: a directory or a PID."""

import time
from collections.abc import Callable
from pathlib import Path

from mxprobe.errors import AttachError
from mxprobe.trace import layout

_STATUS_TIMEOUT_S = 10.0
_POLL_S = 0.3


def find_trace(target: str, *, say: Callable[[str], None], wait_s: float = 60.0) -> Path:
    """Return the trace directory of `target`. Digits are a PID unless there is a directory of that name.

    A process that is being attached has no trace yet: waited for up to `wait_s`.

    Raises:
        AttachError: that process is not attached, or nothing was recorded in time.
    """
    if not target.isdecimal() or Path(target).exists():
        return Path(target)
    from mxprobe.attach.client import ask
    from mxprobe.attach.rundir import control_socket_of

    pid = int(target)
    deadline = time.monotonic() + wait_s
    has_said = False
    while True:
        control_socket = control_socket_of(pid)
        answer = None if control_socket is None else ask(control_socket, "status", timeout_s=_STATUS_TIMEOUT_S)
        if answer is None:
            raise AttachError(
                "not_attached",
                f"Process {pid} is not attached.",
                cause="it never was, it was detached already, or another user attached to it",
                remedy="`mxprobe status` lists what is attached; for a finished trace give its directory",
            )
        directory = Path(answer["directory"])
        if directory.is_dir() and layout.looks_like_trace(directory):
            return directory
        if time.monotonic() > deadline:
            raise AttachError(
                "not_ready",
                f"Process {pid} is being attached, but nothing has been recorded for {wait_s:.0f} s.",
                cause="it has not taken a step since",
                remedy="try again once `mxprobe status` says it is recording",
            )
        if not has_said:
            say(f"process {pid} is being attached; waiting for its first step")
            has_said = True
        time.sleep(_POLL_S)
