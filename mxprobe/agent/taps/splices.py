"""A table of taps, each wrapped once its module has been imported, until all are given back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Callable

from mxprobe.agent.taps.splice import Listener, Splice, TapNotApplicableError, is_loaded, splice
from mxprobe.agent.taps.table import Tap
from mxprobe.events import Event, Tell


class Splices:
    """`ensure_wrapped` and `give_back` from any thread; nothing raises.

    on_wrapped(tap): a function is listened to.
    on_refused(event): one is not what the table expects.
    on_error(where, error): anything else; may end the whole session, which gives all back.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        listen: Listener,
        *,
        on_wrapped: Callable[[Tap], None],
        on_refused: Tell,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self.closed = False
        self._waiting = list(taps)
        self._held: list[Splice] = []
        self._listen = listen
        self._on_wrapped = on_wrapped
        self._on_refused = on_refused
        self._on_error = on_error
        self._lock = threading.RLock()

    def ensure_wrapped(self) -> None:
        """Tap what has been imported by now; cheap enough for every step, and never waits."""
        if self.closed or not self._lock.acquire(blocking=False):
            return
        try:
            for tap in [tap for tap in self._waiting if is_loaded(tap.module)]:
                if not self.closed:
                    self._waiting.remove(tap)
                    self._wrap(tap)
        finally:
            self._lock.release()

    def _wrap(self, tap: Tap) -> None:
        try:
            self._held.append(splice(tap, sys.modules[tap.module], self._listen))
            self._on_wrapped(tap)
        except TapNotApplicableError as reason:
            self._on_refused(Event("tap", tap.source, "refused", text=str(reason)))
        except Exception as error:
            self._on_error(f"tap {tap.source}", error)

    def _is_back(self, tapped: Splice) -> bool:
        try:
            return tapped.remove()
        except Exception as error:
            self._on_error(f"giving {tapped.tap.source} back", error)
            return False

    def give_back(self) -> list[Event]:
        """Give every function back. Return events of those left in place because somebody has wrapped ours since."""
        with self._lock:
            self.closed = True
            held, self._held = self._held, []
            left = [tapped.tap.source for tapped in reversed(held) if not self._is_back(tapped)]
        words = "left in place, passing calls on: {} was wrapped again"
        return [Event("tap", source, "left_in_place", text=words.format(source)) for source in left]


def wrapped(tap: Tap, what: str) -> Event:
    """Return the event that a function is listened to; `what` goes into brackets."""
    return Event("tap", tap.source, "wrapped", text=f"{tap.source} ({what})")
