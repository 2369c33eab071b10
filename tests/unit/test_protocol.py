"""Frames survive the wire exactly; whatever is not a frame is refused."""

from __future__ import annotations

import math
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxprobe.protocol import MAX_FRAME_BYTES, AgentConfig, ProtocolError, encode, recv_frame, send_frame


def over_the_wire(data: bytes) -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        return recv_frame(theirs)


@given(st.lists(st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1) | st.text() | st.none(), max_size=50))
def test_values_survive_bit_for_bit(values: list[Any]) -> None:
    frame = {"verb": "batch", "seq": 1, "table": "events", "columns": {"value": values}}
    assert over_the_wire(encode(frame)) == frame


def test_nan_and_infinities_survive() -> None:
    received = over_the_wire(encode({"verb": "batch", "columns": {"x": [math.nan, math.inf, -math.inf]}}))
    nan, plus, minus = received["columns"]["x"]
    assert math.isnan(nan)
    assert (plus, minus) == (math.inf, -math.inf)


def test_frames_follow_each_other_then_the_stream_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert send_frame(ours, {"verb": "ping"}) == len(encode({"verb": "ping"}))
        send_frame(ours, {"verb": "status"})
        ours.shutdown(socket.SHUT_WR)
        assert [recv_frame(theirs), recv_frame(theirs), recv_frame(theirs)] == [
            {"verb": "ping"},
            {"verb": "status"},
            None,
        ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "over the limit"),
        (struct.pack(">I", 10) + b"{}", "ended inside a frame"),
        (b"\x00\x00", "ended inside a frame"),
        (struct.pack(">I", 4) + b"nope", "not JSON"),
        (struct.pack(">I", 2) + b"[]", "no known verb"),
        (struct.pack(">I", 15) + b'{"verb":"exec"}', "no known verb"),
    ],
)
def test_anything_else_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        over_the_wire(data)


def test_an_oversized_frame_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode({"verb": "batch", "columns": {"x": ["a" * MAX_FRAME_BYTES]}})


def test_config_survives_and_unknown_keys_are_named() -> None:
    config = AgentConfig(every=7, layers=("model.layers.*.mlp.*",), rule="floor", step_timeout_s=1.5)
    assert (
        AgentConfig.from_json(over_the_wire(encode({"verb": "attach", "config": config.to_json()}))["config"]) == config
    )
    with pytest.raises(ProtocolError, match="colour"):
        AgentConfig.from_json({"colour": "blue"})
