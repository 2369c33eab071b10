"""The sending half, over a real socket pair."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator

import pytest

from mxprobe import protocol
from mxprobe.agent.transport import Transport


@pytest.fixture
def pair() -> Generator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_batches_arrive_in_order_and_count_until_acknowledged(pair: tuple[socket.socket, socket.socket]):
    transport = Transport(pair[0])
    for step in range(3):
        assert transport.batch("events", {"step": [step]})
    transport.control({"verb": "status"})
    frames = [protocol.recv_frame(pair[1]) for _ in range(4)]
    assert [frame["seq"] for frame in frames[:3] if frame] == [1, 2, 3]
    assert frames[3] == {"verb": "status"}
    assert transport.pending()[0] == 3
    assert not transport.flush(0.05)
    for seq in (1, 2, 3):
        transport.acknowledge(seq)
    assert transport.flush(1.0)
    assert transport.sent_bytes > 0
    transport.close()


def test_a_full_queue_drops_and_counts_and_never_waits(pair: tuple[socket.socket, socket.socket]):
    transport = Transport(pair[0], max_pending_bytes=4000)
    started = time.perf_counter()
    accepted = [transport.batch("events", {"detail": ["x" * 1000] * 2}) for _ in range(20)]
    assert time.perf_counter() - started < 0.5
    assert accepted == [True] + [False] * 19
    assert transport.n_dropped_rows == 38
    transport.close()


def test_a_reader_that_stops_blocks_neither_callers_nor_close(pair: tuple[socket.socket, socket.socket]):
    transport = Transport(pair[0])
    started = time.perf_counter()
    for _ in range(8):
        transport.batch("events", {"detail": ["x" * 1_000_000]})  # more than the kernel buffers
    assert not transport.flush(0.1)
    transport.close()
    assert time.perf_counter() - started < 2
    assert "mxprobe-sender" not in {thread.name for thread in threading.enumerate()}


def test_a_peer_that_is_gone_breaks_the_transport_quietly(pair: tuple[socket.socket, socket.socket]):
    transport = Transport(pair[0])
    pair[1].close()
    transport.batch("events", {"step": [1, 2]})
    assert not transport.flush(1.0)
    assert transport.broken
    assert not transport.batch("events", {"step": [3]})
    assert transport.n_dropped_rows == 1
    transport.close()


def test_values_survive_the_wire(pair: tuple[socket.socket, socket.socket]):
    transport = Transport(pair[0])
    transport.batch("whatif", {"sum_e2": [0.1 + 0.2, float("inf"), 1e-300]})
    frame = protocol.recv_frame(pair[1])
    assert frame is not None
    assert frame["columns"]["sum_e2"] == [0.1 + 0.2, float("inf"), 1e-300]
    transport.close()
