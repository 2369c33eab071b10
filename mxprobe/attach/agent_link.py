"""The agent at the other end of the control socket: what it has said of itself, and what keeps its lease."""

import time
from typing import Any

from mxprobe.attach.server import Peer
from mxprobe.protocol import Frame

_PING_EVERY_S = 1.0
_ASK_STATUS_EVERY_S = 5.0


class AgentLink:
    """Belongs to the controller's thread. Frames are kept without being judged."""

    def __init__(self) -> None:
        self.hello: Frame = {}
        self.attached: Frame | None = None
        self.detached: Frame | None = None
        self.status: dict[str, Any] = {}
        """What it last said of itself."""
        self._peer: Peer | None = None
        self._last_ping = self._last_asked = float("-inf")

    @property
    def is_here(self) -> bool:
        return self._peer is not None

    @property
    def is_out(self) -> bool:
        """Nothing of it runs in the process any more, as far as it can be known."""
        return self._peer is None or self.detached is not None

    @property
    def rank(self) -> int:
        """The rank that the process says it has; 0 where it says none."""
        rank = str(self.hello.get("rank", ""))
        return int(rank) if rank.isdecimal() and len(rank) < 10 else 0

    @property
    def place(self) -> dict[str, Any]:
        """What it is attached to, as facts for `run.json`."""
        attached = self.attached or {}
        what = {name: attached.get(name) for name in ("role", "roots", "recipes", "kernels_ms")}
        return {**what, "attached_step": attached.get("step")}

    def arrive(self, peer: Peer, hello: Frame) -> None:
        self._peer, self.hello = peer, hello

    def leave(self) -> None:
        """Its connection has ended, or will not be waited for."""
        self._peer = None

    def say(self, frame: Frame) -> None:
        if self._peer is not None:
            self._peer.send(frame)

    def keep_in_touch(self, *, ask_status: bool) -> None:
        """Renew its lease, and ask how it is, as often as is due."""
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
