"""The agent at the other end of the control socket: what it has told of itself, and what keeps its lease."""

import time
from typing import Any

from mxprobe.attach.server import Peer
from mxprobe.protocol import Frame

_PING_EVERY_S = 1.0
_ASK_STATUS_EVERY_S = 5.0


class AgentLink:
    """Only the controller's thread may use it. It keeps frames and does not judge them."""

    def __init__(self) -> None:
        self.hello: Frame = {}
        self.attached: Frame | None = None
        self.detached: Frame | None = None
        self.status: dict[str, Any] = {}
        """What it last told of itself."""
        self._peer: Peer | None = None
        self._last_ping = self._last_asked = float("-inf")

    @property
    def is_here(self) -> bool:
        return self._peer is not None

    @property
    def is_out(self) -> bool:
        """True once nothing of it runs in the process any more, as far as can be known."""
        return self._peer is None or self.detached is not None

    @property
    def rank(self) -> int:
        """The rank that the process says it has; 0 where it says none."""
        rank = str(self.hello.get("rank", ""))
        return int(rank) if rank.isdecimal() and len(rank) < 10 else 0

    @property
    def place(self) -> dict[str, Any]:
        """Facts for `run.json` about what it is attached to."""
        attached = self.attached or {}
        what = {name: attached.get(name) for name in ("role", "roots", "recipes", "kernels_ms")}
        return {**what, "attached_step": attached.get("step")}

    def arrive(self, peer: Peer, hello: Frame) -> None:
        self._peer, self.hello = peer, hello

    def leave(self) -> None:
        """Note that its connection has ended, or that nobody waits for it any more."""
        self._peer = None

    def say(self, frame: Frame) -> None:
        if self._peer is not None:
            self._peer.send(frame)

    def keep_in_touch(self, *, ask_status: bool) -> None:
        """Renew its lease and ask for its status, as often as each is due."""
        now = time.monotonic()
        if now - self._last_ping >= _PING_EVERY_S:
            self._last_ping = now
            self.say({"verb": "ping"})
        if ask_status and now - self._last_asked >= _ASK_STATUS_EVERY_S:
            self._last_asked = now
            self.say({"verb": "status"})

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
