"""Whatever a peer sends, the control socket and the job's listener go on serving the next one.

`MXPROBE_FUZZ=N` makes N conversations instead of the default.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mxprobe import listener
from mxprobe.agent.boot import _Agent  # pyright: ignore[reportPrivateUsage]
from mxprobe.agent.listening import Listening
from mxprobe.agent.transport import Transport
from mxprobe.attach.server import ClientAsked, ControlServer, Event
from mxprobe.attach.trace_recorder import RunTrace, TraceRecorder
from mxprobe.protocol import PROTOCOL_VERSION, VERBS, encode, recv_frame
from mxprobe.tables import TABLES
from mxprobe.trace import open_trace

N_EXAMPLES = int(os.environ.get("MXPROBE_FUZZ", "100"))
TOKEN = "0123456789abcdef"
HELLO = {"verb": "hello", "token": TOKEN, "protocol": PROTOCOL_VERSION}
conversations = settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
columns = st.dictionaries(
    st.sampled_from([name for table in TABLES.values() for name, _ in table]) | st.text(max_size=8),
    st.lists(json_values, max_size=4) | json_values,
    max_size=4,
)
batches = st.fixed_dictionaries(
    {"verb": st.just("batch")},
    optional={"seq": json_values, "table": st.sampled_from([*TABLES]) | json_values, "columns": columns | json_values},
)
frames = (
    batches
    | st.just(HELLO)
    | st.builds(
        lambda verb, rest: {**rest, "verb": verb},
        st.sampled_from(sorted(VERBS)) | json_values,
        st.dictionaries(st.sampled_from(["token", "protocol", "seq", "reason"]), json_values, max_size=3),
    )
)
pieces = (
    frames.map(lambda frame: _frame(json.dumps(frame).encode()))
    | st.binary(max_size=40)
    | st.binary(max_size=40).map(lambda data: _frame(data))
    | st.just(struct.pack(">I", 200_000) + b"[" * 200_000)
    | st.just(struct.pack(">I", 2**32 - 1))
)


def _frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def talk(path: str, sent: list[bytes]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(20)
        peer.connect(path)
        try:
            for data in sent:
                peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        except (ConnectionError, BrokenPipeError):
            pass  # it has hung up on us


@conversations
@given(sent=st.lists(pieces, max_size=4), is_agent=st.booleans())
def test_the_control_socket_serves_the_next_after_anything(
    tmp_path_factory: pytest.TempPathFactory, sent: list[bytes], is_agent: bool
) -> None:
    directory = tmp_path_factory.mktemp("c")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    trace = RunTrace(directory / "run.mxprobe", [os.getpid()], {})
    recorder = TraceRecorder(trace, os.getpid())
    recorder.open()
    server = ControlServer(directory / "s", token=TOKEN, pid=os.getpid(), events=events, on_batch=recorder.write)
    try:
        talk(str(directory / "s"), [encode(HELLO), *sent] if is_agent else sent)
        while not events.empty():
            events.get()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(directory / "s"))
            client.sendall(encode({"verb": "status"}))
            while not isinstance(event := events.get(timeout=20), ClientAsked):
                pass
            assert event.frame["verb"] == "status"
    finally:
        server.close()
        recorder.end("done")
    assert open_trace(directory / "run.mxprobe").is_complete


orders = st.builds(
    lambda verb, rest: {**rest, "verb": verb},
    st.sampled_from(["set", "trigger", "ack", "status", "ping", "detach"]) | st.sampled_from(sorted(VERBS)),
    st.dictionaries(st.sampled_from(["id", "recipe", "at_step", "reason", "seq"]), json_values, max_size=4),
)


@conversations
@given(sent=st.lists(orders | pieces, max_size=4))
def test_the_agent_outlives_any_controller(sent: list[Any]) -> None:
    """It does what it can make sense of, or leaves; `_receive` raises nothing, for its own thread to die of."""
    ours, theirs = socket.socketpair()
    agent = _Agent("/nowhere", TOKEN)
    agent._sock.close()  # pyright: ignore[reportPrivateUsage]
    agent._sock = ours  # pyright: ignore[reportPrivateUsage]
    transport = Transport(ours)
    session = Listening(transport, error_budget=20)
    try:
        for each in sent:
            theirs.sendall(each if isinstance(each, bytes) else encode(each))
            if isinstance(each, bytes):
                theirs.shutdown(socket.SHUT_WR)
                break
        while select.select([ours], [], [], 0)[0] and not agent._lost:  # pyright: ignore[reportPrivateUsage]
            agent._receive(session, transport)  # pyright: ignore[reportPrivateUsage]
            session.tick()
    finally:
        session.abandon("done")
        transport.close()
        theirs.close()


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
    path = listener.listen()
    assert path is not None
    yield path
    listener._close()  # pyright: ignore[reportPrivateUsage]
    patch.undo()


requests = st.dictionaries(st.sampled_from(["socket", "archive", "token", "verb"]), json_values, max_size=4)


@conversations
@given(sent=st.lists(pieces | requests.map(lambda r: _frame(json.dumps(r).encode())), max_size=3))
def test_the_listener_answers_the_next_after_anything(listening: str, sent: list[bytes]) -> None:
    talk(listening, sent)
    assert asked(listening, {"verb": "status"})["reason"] == "unknown_verb"


@pytest.mark.parametrize("archive", ["/etc/passwd", "relative.zip", "/tmp", ""])
def test_the_listener_runs_nothing_from_a_place_that_others_can_write(listening: str, archive: str) -> None:
    answer = asked(listening, {"verb": "connect", "socket": "/nowhere", "archive": archive, "token": ""})
    assert answer["reason"] == "load_failed"
    assert "PermissionError" in answer["detail"]


def asked(path: str, request: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(20)
        peer.connect(path)
        peer.sendall(_frame(json.dumps(request).encode()))
        answer = recv_frame(peer)
    assert answer is not None
    return answer


def test_both_sockets_are_their_owners_alone(listening: str, tmp_path: Path) -> None:
    server = ControlServer(
        tmp_path / "s", token=TOKEN, pid=os.getpid(), events=queue.SimpleQueue(), on_batch=lambda frame: None
    )
    try:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    finally:
        server.close()
    assert Path(listening).stat().st_mode & 0o777 == 0o600
    assert Path(listening).parent.stat().st_mode & 0o777 == 0o700
