"""The control socket. It checks who connects, and hands what they send to the controller's loop as events.

Batches do not pass through the loop: the agent's own thread hands them to `on_batch` and acknowledges them when it
returns, so a slow disk delays acknowledgements, never the lease.
"""

import contextlib
import hmac
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mxprobe.errors import MxprobeError
from mxprobe.listener import peer_of
from mxprobe.protocol import PROTOCOL_VERSION, Frame, ProtocolError, recv_frame, send_frame

_FIRST_FRAME_TIMEOUT_S = 10.0


class Peer:
    """The other end of one connection. Any thread may call `send`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> bool:
        """Return False if the peer is gone, which its own thread reports as an event."""
        try:
            with self._sending:
                send_frame(self._connection, frame)
        except OSError:
            return False
        return True

    def receive(self) -> Frame | None:
        return recv_frame(self._connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class AgentHello(NamedTuple):
    agent: Peer
    frame: Frame


class AgentSaid(NamedTuple):
    frame: Frame


class AgentGone(NamedTuple):
    detail: str


class WriteFailed(NamedTuple):
    error: MxprobeError


class ClientAsked(NamedTuple):
    client: Peer
    frame: Frame


class Interrupted(NamedTuple):
    """The user of this very process asked to leave."""


class TriggerWanted(NamedTuple):
    """The flight recorders are to write their past, for that reason."""

    reason: str


Event = AgentHello | AgentSaid | AgentGone | WriteFailed | ClientAsked | Interrupted | TriggerWanted


class ControlServer:
    """Listens on `path` for one agent, which knows the token and has the PID, and for any number of clients."""

    def __init__(
        self, path: Path, *, token: str, pid: int, events: "queue.SimpleQueue[Event]", on_batch: Callable[[Frame], None]
    ) -> None:
        self._token = token
        self._pid = pid
        self._events = events
        self._on_batch = on_batch
        self._has_agent = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        os.chmod(path, 0o600)
        self._socket.listen(8)
        threading.Thread(target=self._accept, name="control-socket", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="control-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        peer = Peer(connection)
        try:
            pid, uid = peer_of(connection)
            if uid not in (0, os.getuid()):
                return
            connection.settimeout(_FIRST_FRAME_TIMEOUT_S)
            frame = peer.receive()
            connection.settimeout(None)
            if frame is None:
                return
            if frame["verb"] == "hello":
                if self._is_our_agent(pid, frame) and self._has_agent.acquire(blocking=False):
                    self._serve_agent(peer, frame)
            elif frame["verb"] in ("status", "detach", "trigger", "set"):
                self._events.put(ClientAsked(peer, frame))
                peer.receive()  # None once the client has its answer and leaves
        except (OSError, ProtocolError):
            return
        finally:
            peer.close()

    def _is_our_agent(self, pid: int, hello: Frame) -> bool:
        token = str(hello.get("token", ""))
        return (
            pid == self._pid
            and hmac.compare_digest(token.encode(errors="replace"), self._token.encode())
            and hello.get("protocol") == PROTOCOL_VERSION
        )

    def _serve_agent(self, agent: Peer, hello: Frame) -> None:
        detail = ""
        try:
            self._events.put(AgentHello(agent, hello))
            while (frame := agent.receive()) is not None:
                if frame["verb"] != "batch":
                    self._events.put(AgentSaid(frame))
                    continue
                self._on_batch(frame)
                agent.send({"verb": "ack", "seq": frame["seq"]})
        except MxprobeError as error:
            self._events.put(WriteFailed(error))
            return
        except (OSError, ProtocolError, KeyError, TypeError, ValueError) as error:
            detail = str(error) or type(error).__name__
        self._events.put(AgentGone(detail))
