"""Which steps are probed. One that is due while the last is still being measured, or not paid for, is put off.

After the first, those whose number in the whole run is a multiple of N: by the optimizer's own count, which is the same
on every rank whenever each was attached. Without such a count, every N-th step since attach.
"""

from __future__ import annotations

from mxprobe.agent.clock import Clock
from mxprobe.measuring.versions.weight_history import RECENT


class Schedule:
    """Call `plan` before each step and `close` after it.

    A probed step in which nothing was generated leaves a generation owed: the following steps are watched, for
    realised errors only, until one generates. A run that never does is not watched again until its next probe.
    """

    def __init__(self, every: int, weights_every: int) -> None:
        self._every = every
        self._weights_every = weights_every
        self._next_due = 1
        self._weights_due = 1
        self._base: int | None = None
        """Steps of the run before attach."""
        self._is_aligned = False
        self._owed_until = 0
        self._generates: bool | None = None
        self._demanded = 0

    def demand(self, n: int) -> None:
        """Probe the next n steps that can be, weights included; from any thread."""
        self._demanded = n

    def align(self, base: int) -> None:
        """The run had taken so many steps before attach; from any thread."""
        self._base = base

    def is_due(self, step: int) -> bool:
        return step >= self._next_due

    def plan(self, clock: Clock, *, busy: bool, affordable: bool = True) -> None:
        """Decide what of the step `clock.step` is probed.

        `busy`: earlier snapshots are not measured yet. Where it is not `affordable` only what was demanded is done.
        """
        step = clock.step
        clock.keeps_versions = not busy and step >= self._next_due - RECENT
        if self._base is not None and not self._is_aligned:
            self._is_aligned = True
            if self._next_due > 1:
                self._next_due = self._after(step - 1, self._every, self._next_due)
            if self._weights_due > 1:
                self._weights_due = self._after(step - 1, self._weights_every, self._weights_due)
        if busy or not (affordable or self._demanded):
            return
        if self._demanded:
            self._demanded -= 1
            clock.probed = clock.with_weights = True
        elif self.is_due(step):
            clock.probed = True
            clock.with_weights = step >= self._weights_due
            self._next_due = self._after(step, self._every, self._next_due + self._every)
            if clock.with_weights:
                self._weights_due = self._after(step, self._weights_every, self._weights_due + self._weights_every)
        elif step <= self._owed_until:
            clock.only_outputs = True

    def _after(self, step: int, n: int, otherwise: int) -> int:
        """The first step after `step` that is the run's n-th; `otherwise`, or the next, where that is not known."""
        if self._base is None:
            return max(otherwise, step + 1)
        return step + n - (self._base + step) % n

    def close(self, clock: Clock) -> None:
        """The step is over."""
        if clock.generated:
            self._generates, self._owed_until = True, 0
        elif clock.probed and self._generates is not False:
            self._owed_until = clock.step + self._every - 1
        elif clock.only_outputs and clock.step == self._owed_until and self._generates is None:
            self._generates = False
