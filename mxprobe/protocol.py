"""The wire between the agent (in the user's process) and the controller (which writes the trace).

One Unix stream socket, owned by the controller, in a 0700 directory. Both the agent and the command-line
clients (`detach`, `status`) connect to it; the first frame says who calls. A frame is a 4-byte big-endian
length and a JSON object with a `verb`. No pickle, nothing is evaluated, lengths and verbs are checked.
Standard library only and Python 3.9 syntax: the agent ships this file.

    agent -> controller   hello     {token, pid, protocol, python, torch, ...}
                          attached  {roots, modules, role, step}           hooks are in
                          failed    {reason, detail}                       observed, but could not attach
                          batch     {seq, table, columns: {name: [...]}}   rows; kept until acknowledged
                          status    {...}                                  answer to `status`
                          set       {id, ok, ...}                          answer to `set`, after the switch
                          detached  {steps, ...}                           hooks are out; the socket closes next
    controller -> agent   attach    {config}                               answer to hello
                          ack       {seq}                                  that batch is on disk
                          ping      {}                                     renews the lease
                          status    {}
                          trigger   {reason}                           keep the past, full statistics now
                          set       {id, recipe, at_step}              switch the recipe at a step boundary
                          detach    {}
    client -> controller  status    {}            -> status {...}
                          trigger   {}            -> triggered {recorded}
                          set       {recipe, at_step} -> set {ok, step, models} | set {ok, reason, detail}
                          detach    {}            -> detached {...}
    controller -> listener  connect {socket, archive, token}   -> connected {} | failed {reason, detail}

The listener is the job's own socket (`mxprobe.listener`), where there is one: there the controller connects, and
the process is asked to load the agent.
"""

import json
import socket
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

from mxprobe.schema import DEFAULT_ARMS
from mxprobe_kernels.recipe_grammar import CHANNEL_WHATIFS, DEFAULT_WHATIFS

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024
VERBS = frozenset(
    {"hello", "attach", "attached", "failed", "batch", "ack", "ping", "status", "detach", "detached"}
    | {"connect", "connected", "trigger", "triggered", "set"}
)

Frame = dict[str, Any]


class ProtocolError(Exception):
    """The peer sent something that is not a frame of this protocol."""


@dataclass(frozen=True)
class AgentConfig:
    """What the controller asks of the agent. It travels as JSON in the `attach` frame."""

    every: int = 50
    """Probe every N-th optimizer step (X, G, realised output error)."""
    weights_every: int = 200
    """Decompose W every N-th optimizer step (a multiple of `every` is probed together with it)."""
    layers: tuple[str, ...] = ("*",)
    """Globs over module names; a module is probed if one matches."""
    format: str = "mxfp4"
    rule: str = "rceil"
    """Rule of the hypothetical quantizer in `tensors` and `whatif`; the run's own is inferred, see `outputs`."""
    whatifs: tuple[str, ...] = (*DEFAULT_WHATIFS, *CHANNEL_WHATIFS)
    max_rows: int = 512
    """Rows of X and G measured per module and probed step; more are sampled."""
    max_features: int = 512
    """Output features (and input features, for the backward products) measured per module; more are sampled."""
    experts: int = 8
    """Of experts held as one parameter, how many of the worst are kept by name; -1: all, and all are measured."""
    sensitivity_every: int = 200
    """Replay a microbatch for Delta2 every N-th optimizer step, the first after a tenth of that; 0: never."""
    replay_every: int = 0
    """Replay a microbatch under `replay_arms` every N-th optimizer step; 0: never."""
    replay_arms: tuple[str, ...] = DEFAULT_ARMS
    gradient_probes: int = 4
    """Random directions of each replay by which errors are followed into the weight gradients; 0: none."""
    max_overhead: float = 0.0
    """Share of the step time that the probe may cost; probes are put off, then made smaller. 0: no limit."""
    max_gpu_memory: int = 256 << 20
    """Bytes of the GPU that copies and measuring them, or a replay, may take at once: fewer modules, rows and features
    are then measured at a time, and replays that need more are skipped. 0: no limit."""
    eager_probe_steps: bool = False
    """Run the probed steps of a compiled model eagerly, so that hooks on its modules are called; not bit for bit."""
    record: bool = False
    """Flight recorder: norms of every output and gradient at each step, written when something goes wrong."""
    follow_steps: int = 8
    """Steps of full statistics after a trigger."""
    torch_wait_s: float = 3.0
    """How long to wait for a process that has not yet imported torch."""
    step_timeout_s: float = 60.0
    """How long to wait for the first optimizer step (or rollout) before giving up."""
    lease_s: float = 10.0
    """Without a ping for so long, the agent takes itself off."""
    error_budget: int = 20
    """Swallowed exceptions after which the agent takes itself off."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "AgentConfig":
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ProtocolError(f"unknown config keys: {', '.join(unknown)}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(**values)


def encode(frame: Frame) -> bytes:
    """Return the length-prefixed bytes of a frame. Floats keep all digits; NaN and infinities survive."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return struct.pack(">I", len(body)) + body


def send_frame(sock: socket.socket, frame: Frame) -> int:
    """Send one frame; returns its size in bytes. OSError when the peer is gone."""
    data = encode(frame)
    sock.sendall(data)
    return len(data)


def recv_frame(sock: socket.socket) -> Optional[Frame]:
    """Return the next frame, or None at a clean end of stream. ProtocolError on anything malformed."""
    head = _recv_exactly(sock, 4)
    if head is None:
        return None
    (size,) = struct.unpack(">I", head)
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    body = _recv_exactly(sock, size)
    if body is None:
        raise ProtocolError("stream ended inside a frame")
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"frame is not JSON: {error}") from None
    verb = frame.get("verb") if isinstance(frame, dict) else None
    if not isinstance(verb, str) or verb not in VERBS:
        raise ProtocolError("frame has no known verb")
    return frame


def _recv_exactly(sock: socket.socket, size: int) -> Optional[bytes]:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = sock.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            if chunks:
                raise ProtocolError("stream ended inside a frame")
            return None
        chunks += chunk
    return bytes(chunks)
