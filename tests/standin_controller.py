"""The controller's side of the wire, in memory: what the agent sent, and nothing written anywhere."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mxprobe import protocol
from mxprobe.protocol import AgentConfig, Frame

TIMEOUT_S = 60.0


class StandinController:
    """Accepts one agent, acknowledges its batches, keeps its rows and frames.

    `ping=False` lets the lease run out; `acknowledge=False` leaves batches unacknowledged.
    """

    def __init__(self, directory: Path, config: AgentConfig, *, ping: bool = True, acknowledge: bool = True) -> None:
        self.path = directory / "control.sock"
        self.frames: list[Frame] = []
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.attached = threading.Event()
        """Set by `attached` and by `failed`."""
        self.closed = threading.Event()
        self._config = config
        self._ping = ping
        self._acknowledge = acknowledge
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen(1)
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="standin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._server.accept()
        self._connection = connection
        hello = protocol.recv_frame(connection)
        assert hello is not None
        self.frames.append(hello)
        self.send({"verb": "attach", "config": self._config.to_json()})
        if self._ping:
            threading.Thread(target=self._keep_pinging, name="standin-ping", daemon=True).start()
        try:
            while (frame := protocol.recv_frame(connection)) is not None:
                self._take(frame)
        except (OSError, protocol.ProtocolError):
            pass  # the agent is gone, or we have closed on purpose
        self.closed.set()

    def _take(self, frame: Frame) -> None:
        if frame["verb"] == "batch":
            columns = frame["columns"]
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            self.rows.setdefault(frame["table"], []).extend(rows)
            if self._acknowledge:
                self.send({"verb": "ack", "seq": frame["seq"]})
        else:
            self.frames.append(frame)
            if frame["verb"] in ("attached", "failed"):
                self.attached.set()

    def _keep_pinging(self) -> None:
        while not self.closed.wait(0.2):
            self.send({"verb": "ping"})

    def send(self, frame: Frame) -> None:
        assert self._connection is not None
        with self._sending:
            try:
                protocol.send_frame(self._connection, frame)
            except OSError:
                self.closed.set()

    def frame(self, verb: str) -> Frame:
        """The first frame of that verb; waits for it."""
        return wait_for(lambda: next((f for f in list(self.frames) if f["verb"] == verb), None), f"no {verb} frame")

    def die(self) -> None:
        """End the connection without a word, as a killed controller does."""
        assert self._connection is not None
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        if self._connection is not None:
            self._connection.close()


def wait_for(get: Callable[[], Any], otherwise: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The first true value of `get`; AssertionError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := get()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)
    return value


@contextmanager
def controlled(directory: Path, **options: Any) -> Generator[StandinController]:
    """A controller waiting for an agent; `ping` and `acknowledge` as above, all else is the agent's configuration."""
    behaviour = {name: options.pop(name) for name in ("ping", "acknowledge") if name in options}
    controller = StandinController(directory, AgentConfig(**options), **behaviour)
    try:
        yield controller
    finally:
        controller.close()


@contextmanager
def agent_thread(controller: StandinController) -> Generator[threading.Thread]:
    """The agent in a thread of this process, as the payload starts it; must end by itself."""
    from mxprobe.agent import boot

    thread = threading.Thread(
        target=boot.start, args=(str(controller.path), "token"), name="mxprobe-agent", daemon=True
    )
    thread.start()
    try:
        yield thread
    finally:
        thread.join(20)
        assert not thread.is_alive(), "the agent did not leave"
