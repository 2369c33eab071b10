"""How an attachment ended, and how it tells what it does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Saying(Protocol):
    """Where a controller tells what it does: `say` for good, `show` for now."""

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How an attachment ended: `detached`, `interrupted`, `duration`, `target_exited`, `agent_lost`, or the agent's
    own reason."""

    reason: str
    directory: Path
    n_rows: int
    steps: int | None
    name: str = ""
    """Of the process among those of a group."""
