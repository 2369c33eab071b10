"""Requests to a running controller, from another terminal."""

import socket
from pathlib import Path
from typing import Any

from mxprobe.errors import AttachError
from mxprobe.protocol import ProtocolError, recv_frame, send_frame


def ask(control_socket: Path, verb: str, *, timeout_s: float, **members: Any) -> dict[str, Any] | None:
    """Return the controller's answer to a verb, without the verb; None if the controller left before it answered.

    AttachError `no_answer` if it does not answer in time.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(control_socket))
            send_frame(connection, {"verb": verb, **members})
            answer = recv_frame(connection)
    except TimeoutError:
        raise AttachError(
            "no_answer",
            f"The mxprobe process that is attached did not answer `{verb}` within {timeout_s:g} s.",
            cause="it is suspended, or the disk it writes to hangs",
            remedy="look for it with `pgrep -af 'mxprobe attach'`; if it is killed, the agent leaves by itself",
        ) from None
    except (OSError, ProtocolError):
        return None
    return None if answer is None else {key: value for key, value in answer.items() if key != "verb"}
