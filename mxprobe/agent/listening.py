"""A process that logs metrics and has not imported torch: the driver of an RL job, say. Signals, and nothing else.

Stands where `Session` stands for a process that trains; imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import Enum
from typing import Any

from mxprobe.agent.recorder import Recorder
from mxprobe.agent.taps.signal_taps import SignalTaps
from mxprobe.agent.transport import Transport
from mxprobe.events import Event
from mxprobe.measuring.interruptions import is_of_a_signal_handler

FLUSH_EVERY_S = 0.5


class State(Enum):
    ATTACHED = "attached"
    GONE = "gone"


class Listening:
    """`tick` from the agent's thread, which does all the work; rows come from whatever thread logs."""

    role = "metrics"

    def __init__(self, transport: Transport, error_budget: int) -> None:
        self.state = State.ATTACHED
        self.reason = ""
        self.detach_asked = ""
        self.gone = threading.Event()
        self._transport = transport
        self._recorder = Recorder(transport)
        self._rows: deque[tuple[str, dict[str, Any]]] = deque()
        self._n_errors = 0
        self._error_budget = error_budget
        self._failed: set[str] = set()
        self._n_signals = 0
        self._last_flush = time.monotonic()
        self._signals = SignalTaps(self._on_signals, self._on_error, self._on_event)
        try:
            self._signals.ensure_wrapped()
            self._on_event(Event("attached", self.role, "no_torch"))
            self._transport.control({"verb": "attached", "roots": [], "modules": 0, "role": self.role, "step": 0})
        except BaseException:
            self._signals.unwrap()
            raise

    @property
    def worker(self) -> Listening:
        """Return who finishes the work when the agent leaves."""
        return self

    @property
    def is_alive(self) -> bool:
        return True

    def tick(self) -> None:
        if time.monotonic() - self._last_flush > FLUSH_EVERY_S:
            self._signals.ensure_wrapped()
            self._flush()

    def settle_without_step(self) -> None:
        """Do nothing: no step is waited for here."""

    def ask(self, frame: dict[str, Any]) -> None:
        """Refuse a command of the user's: no model runs here."""
        if frame["verb"] == "set":
            refusal = {"ok": False, "reason": "no_steps", "detail": "it has no torch, so it trains nothing"}
            self._transport.control({"verb": "set", "id": frame.get("id", 0), **refusal})
        else:
            reason = frame.get("reason", "")
            words = f"asked: {reason}; nothing is recorded here but signals"
            self._on_event(Event("flight", "", "asked", text=words))

    def ask_detach(self, reason: str) -> None:
        self.abandon(reason)

    def abandon(self, reason: str) -> None:
        if self.state is State.GONE:
            return
        self.state, self.reason = State.GONE, reason
        self._signals.unwrap()
        self._on_event(Event("detached", "", reason))
        self.gone.set()

    def close(self) -> None:
        """Do nothing: all is out already."""

    def drain(self, timeout_s: float) -> bool:
        self._flush()
        return True

    def stop(self, timeout_s: float) -> None:
        self._flush()

    def status(self) -> dict[str, Any]:
        n_unacked, unacked_bytes = self._transport.pending()
        return {
            "state": self.state.value,
            "role": self.role,
            "signals": self._n_signals,
            "n_dropped": self._transport.n_dropped_rows,
            "n_errors": self._n_errors,
            "sent_bytes": self._transport.sent_bytes,
            "unacknowledged": n_unacked,
            "unacknowledged_bytes": unacked_bytes,
        }

    def _on_signals(self, rows: list[dict[str, Any]]) -> None:
        self._rows.extend(("signals", row) for row in rows)

    def _on_event(self, event: Event) -> None:
        self._rows.append(("events", event.at({"step": 0, "time_ns": time.time_ns()})))

    def _on_error(self, where: str, error: BaseException) -> None:
        if is_of_a_signal_handler(error):
            raise error
        self._n_errors += 1
        if where not in self._failed:
            self._failed.add(where)
            self._on_event(Event("error", where, text=f"{where}: {type(error).__name__}: {error}"[:400]))
        if self._n_errors > self._error_budget:
            self.abandon("error_budget")

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        while self._rows:
            table, row = self._rows.popleft()
            self._n_signals += table == "signals"
            self._recorder.add(table, row)
        self._recorder.flush()
