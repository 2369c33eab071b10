"""The other commands (`status`, `detach`, `trigger`, `set`) that wait for an answer of the controller they asked."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from mxprobe.attach.server import Peer

_STATUS_ANSWER_S = 1.0


def not_switched(reason: str, detail: str) -> dict[str, Any]:
    """Return the answer to `set` where the agent does not give it."""
    return {"verb": "set", "ok": False, "reason": reason, "detail": detail}


class WaitingClients:
    """Clients who wait for an answer. Only the controller's thread may use it.

    Args:
        status: returns what `mxprobe status` shows; called at the time of answering.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status
        self._for_status: list[tuple[float, Peer]] = []
        self._for_end: list[Peer] = []
        self._for_switch: dict[int, Peer] = {}

    def wait_for_status(self, client: Peer) -> None:
        """Answer this client when the agent has told its state, or with what is known after a second."""
        self._for_status.append((time.monotonic() + _STATUS_ANSWER_S, client))

    def wait_for_end(self, client: Peer) -> None:
        self._for_end.append(client)

    def wait_for_switch(self, client: Peer) -> int:
        """Return the number under which the agent is to answer."""
        number = max(self._for_switch, default=0) + 1
        self._for_switch[number] = client
        return number

    def answer_switch(self, frame: Mapping[str, Any]) -> None:
        client = self._for_switch.pop(frame.get("id", 0), None)
        if client is not None:
            client.send({key: value for key, value in frame.items() if key != "id"})

    def answer_status(self, *, everyone: bool) -> None:
        now = time.monotonic()
        due = [client for deadline, client in self._for_status if everyone or now >= deadline]
        self._for_status = [item for item in self._for_status if item[1] not in due]
        for client in due:
            client.send({"verb": "status", **self._status()})

    def answer_the_end(self, detached: Mapping[str, Any]) -> None:
        """Give the last answers: to clients that asked for the end, and to those that wait for anything else."""
        self.answer_status(everyone=True)
        for number in list(self._for_switch):
            self.answer_switch(not_switched("left", "the attach has ended") | {"id": number})
        for client in self._for_end:
            client.send({"verb": "detached", **detached})
