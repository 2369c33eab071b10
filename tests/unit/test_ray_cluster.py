"""Ray's records of actors, sorted by node."""

from __future__ import annotations

from typing import Any

import pytest

from mxprobe.attach.ray_cluster import Actor, Actors, find_actors, split
from mxprobe.errors import UsageError


def record(pid: int, node: str, state: str = "ALIVE", name: str = "Worker") -> dict[str, Any]:
    return {"Pid": pid, "ActorClassName": name, "State": state, "Address": {"NodeID": node}}


def test_the_living_by_node() -> None:
    records = [record(9, "a"), record(3, "a", name="Logger"), record(5, "b"), record(7, "a", "DEAD"), record(0, "a")]
    here = (Actor(3, "Logger", "a"), Actor(9, "Worker", "a"))
    assert split(records, "a") == Actors(here, (Actor(5, "Worker", "b"),))


def test_no_cluster_is_said_in_words() -> None:
    """Whether ray is installed or not: nothing listens at that address."""
    with pytest.raises(UsageError, match="Ray cluster") as error:
        find_actors("127.0.0.1:1")
    assert error.value.exit_code == 2
