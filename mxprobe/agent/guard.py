"""Keeps the agent's failures out of the user's run: one guard around every function of ours that the run calls."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from typing import Any, Callable

import torch

from mxprobe.agent.clock import Clock
from mxprobe.measuring.interruptions import is_of_a_signal_handler

_MAX_DETAIL = 400

Hook = Callable[..., None]


class Guard:
    """Counts the exceptions that were swallowed; over the budget, asks for the agent to be taken off.

    `on_error(where, detail)` is called for the first error at each place, `on_exhausted()` once. What they raise is
    dropped. Callable from any thread.
    """

    def __init__(
        self,
        budget: int,
        on_error: Callable[[str, str], None],
        on_exhausted: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        """`clock`: what hooks cost is added to its `hook_ns`."""
        self.n_errors = 0
        self._budget = budget
        self._on_error = on_error
        self._on_exhausted = on_exhausted
        self._clock = Clock() if clock is None else clock
        self._places: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def hook(
        self,
        where: str,
        act: Callable[..., None],
        *,
        when: Callable[[], bool] | None = None,
        then: Callable[[Exception], None] | None = None,
    ) -> Hook:
        """Return a function for torch or the user's code to call: it calls `act`, and returns None whatever happens.

        It does nothing while torch.compile traces it, in a forked child (no thread of ours is there, and a lock may
        stay taken), and where `when()` is false. What `act` raises is swallowed at the place `where`; `then(error)`
        follows. The time that it takes is added to the clock.
        """

        def hook(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not (when is None or when()) or self.is_forked:
                return
            started = time.perf_counter_ns()
            try:
                act(*args, **kwargs)
            except Exception as error:
                self.swallow(where, error, None if then is None else partial(then, error))
            self._clock.hook_ns += time.perf_counter_ns() - started

        return hook

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that was attached to."""
        return os.getpid() != self._pid

    def attempt(self, where: str, act: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return what `act` returns, or `otherwise` where it raises; the error is swallowed at the place `where`."""
        try:
            return act()
        except Exception as error:
            self.swallow(where, error)
            return otherwise

    def swallow(self, where: str, error: BaseException, then: Callable[[], None] | None = None) -> None:
        """Count the error, tell of it if it is the first there, and do `then`, whose own errors are dropped.

        Raises nothing but what a signal handler of the user's raised while our code ran: that is the user's.
        """
        if is_of_a_signal_handler(error):
            raise error
        if self.is_forked:
            return
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
