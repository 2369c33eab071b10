"""Keeps the agent's failures and side effects out of the user's run."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Callable

from mxprobe.measuring.interruptions import is_of_a_signal_handler

_MAX_DETAIL = 400


class Guard:
    """Counts the exceptions that were swallowed; over the budget, asks for the agent to be taken off.

    `on_error(where, detail)` is called for the first error at each place, `on_exhausted()` once. What they raise is
    dropped. Callable from any thread.
    """

    def __init__(self, budget: int, on_error: Callable[[str, str], None], on_exhausted: Callable[[], None]) -> None:
        self.n_errors = 0
        self._budget = budget
        self._on_error = on_error
        self._on_exhausted = on_exhausted
        self._places: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def swallow(self, where: str, error: BaseException, then: Callable[[], None] | None = None) -> None:
        """Count the error, tell of it if it is the first there, and do `then`, whose own errors are dropped.

        Raises nothing but what a signal handler of the user's raised while our code ran: that is the user's.
        """
        if is_of_a_signal_handler(error):
            raise error
        if os.getpid() != self._pid:
            return  # a forked child: nobody to tell, and a lock that may stay taken
        with self._lock:
            self.n_errors += 1
            exhausted = self.n_errors == self._budget + 1
            new = where not in self._places
            self._places.add(where)
        if new:
            self._tell(where, error)
        for act in (then, self._on_exhausted if exhausted else None):
            if act is not None:
                with contextlib.suppress(Exception):
                    act()

    def _tell(self, where: str, error: BaseException) -> None:
        try:
            detail = f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
        except Exception:
            detail = f"{type(error).__name__}, whose own words failed"
        with contextlib.suppress(Exception):
            self._on_error(where, detail)
