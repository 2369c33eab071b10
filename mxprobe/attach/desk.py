"""Where the other commands (`status`, `detach`, `trigger`) are answered, by the controller that they ask."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from mxprobe.attach.server import Peer

_STATUS_ANSWER_S = 1.0


class Desk:
    """Clients who wait for an answer. Belongs to the controller's thread.

    status: what `mxprobe status` shows, asked for at the time of answering.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status
        self._for_status: list[tuple[float, Peer]] = []
        self._for_end: list[Peer] = []

    def wait_for_status(self, client: Peer) -> None:
        """Answered when the agent has said how it is, or with what is known after a second."""
        self._for_status.append((time.monotonic() + _STATUS_ANSWER_S, client))

    def wait_for_end(self, client: Peer) -> None:
        self._for_end.append(client)

    def answer_status(self, *, everyone: bool) -> None:
        now = time.monotonic()
        due = [client for deadline, client in self._for_status if everyone or now >= deadline]
        self._for_status = [item for item in self._for_status if item[1] not in due]
        for client in due:
            client.send({"verb": "status", **self._status()})

    def answer_the_end(self, detached: Mapping[str, Any]) -> None:
        """The last answers: to those who asked for the end, and to those who still wait for a status."""
        self.answer_status(everyone=True)
        for client in self._for_end:
            client.send({"verb": "detached", **detached})
