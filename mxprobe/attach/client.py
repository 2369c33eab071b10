"""Requests to a running controller, from another terminal."""

import socket
from pathlib import Path
from typing import Any

from mxprobe.errors import AttachError
from mxprobe.listener import peer_of
from mxprobe.protocol import Frame, ProtocolError, recv_frame, send_frame


def exchange(path: Path, request: Frame, *, timeout_s: float, pid: int | None = None) -> Frame | None:
    """Send a frame to a socket and return the answer; None if nobody answers, or another process than `pid` listens.

    TimeoutError if there is no answer in time.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            if pid not in (None, peer_of(connection)[0]):
                return None
            send_frame(connection, request)
            return recv_frame(connection)
    except TimeoutError:
        raise
    except (OSError, ProtocolError):
        return None


def ask(control_socket: Path, verb: str, *, timeout_s: float, **members: Any) -> dict[str, Any] | None:
    """Return the controller's answer to a verb, without the verb; None if the controller left before it answered.

    AttachError `no_answer` if it does not answer in time.
    """
    try:
        answer = exchange(control_socket, {"verb": verb, **members}, timeout_s=timeout_s)
    except TimeoutError:
        raise AttachError(
            "no_answer",
            f"The mxprobe process that is attached did not answer `{verb}` within {timeout_s:g} s.",
            cause="it is suspended, or the disk it writes to hangs",
            remedy="look for it with `pgrep -af 'mxprobe attach'`; if it is killed, the agent leaves by itself",
        ) from None
    return None if answer is None else {key: value for key, value in answer.items() if key != "verb"}
