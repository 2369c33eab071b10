"""The agent's thread: says hello to the controller, keeps the session, and is the last to leave."""

from __future__ import annotations

import atexit
import os
import platform
import selectors
import socket
import sys
import threading
import time
from typing import Any, Callable

from mxprobe import protocol
from mxprobe._version import __version__

MIN_TORCH = (2, 6)
"""The oldest (major, minor) that the agent runs with: what the distribution itself asks for."""
HANDSHAKE_TIMEOUT_S = 30.0
DETACH_TIMEOUT_S = 5.0
"""Without a step boundary for so long after `detach`, the hooks come out in our own thread."""
DRAIN_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 2.0
"""The user's process may be held up by so much when it ends while we are attached, to send what is there."""
EXIT_PATIENCE_S = 8.0
"""And by so much at the very most, for an operation under way: a thread of ours that comes back from torch into an
interpreter that is gone would abort the process."""
_POLL_S = 0.1


def start(socket_path: str, token: str) -> None:
    """Serve one attach, then leave nothing behind. Blocks until detached; call in a thread of its own.

    Never raises: where the controller cannot be reached there is nobody to tell.
    """
    try:
        _Agent(socket_path, token).run()
    except Exception:
        pass  # the user's process is no place for our traceback; the controller sees the connection end
    finally:
        package = sys.modules.get("mxprobe")
        unload = vars(package).get("_unload") if package is not None else None
        if unload is not None:
            unload()


class _Agent:
    def __init__(self, socket_path: str, token: str) -> None:
        self._socket_path = socket_path
        self._token = token
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._pid = os.getpid()
        self._exiting = False
        self._failed = False
        self._finished = threading.Event()
        self._last_ping = time.monotonic()
        self._lost = ""
        self._detail = ""

    def run(self) -> None:
        sock = self._sock
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            sock.connect(self._socket_path)
            protocol.send_frame(sock, _hello(self._token))
            frame = protocol.recv_frame(sock)
            if frame is None or frame["verb"] != "attach":
                return
            config = protocol.AgentConfig.from_json(frame["config"])
            has_torch = _wait_for_torch(config.torch_wait_s)
            version = _torch_version() if has_torch else None
            if not has_torch and not _logs():
                protocol.send_frame(sock, _failed("no_torch", "torch is not among the imported modules"))
            elif version is not None and version < MIN_TORCH:
                protocol.send_frame(sock, _failed("old_torch", f"torch {'.'.join(map(str, version))}"))
            else:
                sock.settimeout(None)
                self._serve(config, has_torch=has_torch)
        finally:
            self._finished.set()
            atexit.unregister(self._at_exit)
            sock.close()

    def _serve(self, config: protocol.AgentConfig, *, has_torch: bool) -> None:
        from mxprobe.agent.transport import Transport

        transport = Transport(self._sock)
        try:
            try:
                session = _session(config, transport, has_torch=has_torch)
            except Exception as error:
                transport.control(_failed("load_failed", _words(error)))
                transport.flush(1.0, acknowledged=False)
                return
            atexit.register(self._at_exit)
            try:
                self._watch(config, session, transport)
            except Exception as error:
                self._lost, self._detail = "agent_failed", _words(error)
            finally:
                self._leave(session, transport)
        finally:
            transport.close()

    def _watch(self, config: protocol.AgentConfig, session: Any, transport: Any) -> None:
        """Answer the controller until the session is gone."""
        started = self._last_ping = time.monotonic()
        asked: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            while not session.gone.is_set():
                if selector.select(_POLL_S):
                    self._receive(session, transport)
                session.tick()
                now = time.monotonic()
                if not session.worker.is_alive:
                    session.abandon("worker_died")
                if self._exiting:
                    self._lost = "exit"
                elif now - self._last_ping > config.lease_s:
                    self._lost = "lease_expired"
                elif transport.broken:
                    self._lost = "controller_gone"
                if self._lost:
                    session.abandon(self._lost)
                elif session.state.value == "observing" and now - started > config.step_timeout_s:
                    failure = session.settle_without_step()
                    started = now
                    if failure is not None:
                        self._failed = True
                        transport.control({"verb": "failed", **failure})
                elif session.state.value == "serving" and now - started > config.step_timeout_s:
                    session.abandon("no_step")
                    self._failed = True
                    transport.control(_failed("no_step", "forward passes without gradient were seen, then no more"))
                if session.detach_asked:
                    asked = now if asked is None else asked
                    if now - asked > DETACH_TIMEOUT_S:
                        session.abandon(session.detach_asked)

    def _receive(self, session: Any, transport: Any) -> None:
        try:
            frame = protocol.recv_frame(self._sock)
        except (OSError, protocol.ProtocolError):
            frame = None
        if frame is None:
            self._lost = "controller_gone"
            return
        verb = frame["verb"]
        self._last_ping = time.monotonic()
        if verb == "ack":
            seq = frame.get("seq")
            transport.acknowledge(seq if isinstance(seq, int) else 0)
        elif verb == "status":
            transport.control({"verb": "status", **session.status()})
        elif verb == "detach":
            session.ask_detach("asked")
        elif verb in ("trigger", "set"):
            session.ask(frame)

    def _leave(self, session: Any, transport: Any) -> None:
        """Take the hooks out, finish measuring, end the threads, send, say goodbye; a failure stops none of it."""
        quick = self._exiting or transport.broken or bool(self._lost)
        steps: list[Callable[[], Any]] = [
            lambda: session.abandon(session.reason or self._lost or "failed"),
            session.close,
            lambda: session.worker.drain(EXIT_TIMEOUT_S / 2 if quick else DRAIN_TIMEOUT_S),
            lambda: session.worker.stop(EXIT_PATIENCE_S - EXIT_TIMEOUT_S if quick else DRAIN_TIMEOUT_S),
        ]
        if not transport.broken and self._lost != "controller_gone":
            wait_s = EXIT_TIMEOUT_S / 2 if quick else DRAIN_TIMEOUT_S
            steps.append(lambda: self._await_acknowledgements(session, transport, wait_s))
            steps += [] if self._failed else [lambda: self._say_goodbye(session, transport)]
            steps.append(lambda: transport.flush(1.0, acknowledged=False))
        for step in steps:
            try:
                step()
            except Exception as error:
                self._detail = self._detail or _words(error)

    def _say_goodbye(self, session: Any, transport: Any) -> None:
        goodbye = {"verb": "detached", "reason": session.reason, "detail": self._detail}
        try:
            goodbye.update(session.status())
        finally:
            transport.control(goodbye)

    def _await_acknowledgements(self, session: Any, transport: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            while transport.pending()[0] and not transport.broken and time.monotonic() < deadline:
                if selector.select(_POLL_S):
                    self._receive(session, transport)
                if self._lost == "controller_gone":
                    return

    def _at_exit(self) -> None:
        """Let the agent's thread send what it has, for a bounded time: the interpreter ends."""
        if os.getpid() != self._pid:
            return  # a forked child has no such thread to wait for
        self._exiting = True
        self._finished.wait(EXIT_PATIENCE_S)


def _session(config: protocol.AgentConfig, transport: Any, *, has_torch: bool) -> Any:
    if not has_torch:
        from mxprobe.agent.listening import Listening

        return Listening(transport, config.error_budget)
    load_all = vars(sys.modules["mxprobe"]).get("_load_all")
    if load_all is not None:
        load_all()
    from mxprobe.agent.session import Session

    return Session(config, transport)


def _failed(reason: str, detail: str) -> dict[str, Any]:
    return {"verb": "failed", "reason": reason, "detail": detail}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _logs() -> bool:
    from mxprobe.agent.taps.signal_taps import any_sink

    return any_sink()


def _hello(token: str) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "verb": "hello",
        "token": token,
        "pid": os.getpid(),
        "protocol": protocol.PROTOCOL_VERSION,
        "version": __version__,
        "python": platform.python_version(),
        "torch": str(vars(torch).get("__version__", "")) if torch is not None else None,
        "argv": [str(a) for a in getattr(sys, "argv", [])],
        "rank": os.environ.get("RANK", "0"),
    }


def _torch_version() -> tuple[int, ...] | None:
    """Return (major, minor) of the target's torch; None where it does not say, as a build of one's own may not."""
    text = str(vars(sys.modules["torch"]).get("__version__", ""))
    parts = text.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else None


def _wait_for_torch(seconds: float) -> bool:
    """Say whether torch is imported as far as its optimizers, within so many seconds; it is never imported for us."""
    deadline = time.monotonic() + seconds
    while True:
        torch = sys.modules.get("torch")
        spec = vars(torch).get("__spec__") if torch is not None else None
        if torch is not None and not getattr(spec, "_initializing", False):
            return True
        if time.monotonic() > deadline and torch is None:
            return False
        time.sleep(0.05)
