"""What the probe may cost: an account in nanoseconds that every step fills and every hook draws on.

    balance += max_overhead * step - time in our hooks - time the step lost to our measuring thread

A probe is made only when the balance is not negative, so that over the time until then no more than `max_overhead` was
spent. What a step lost to the thread that measures (interpreter lock, cores) is the difference of the median step
while it measured and while it did not, where the two can be told apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from mxprobe.events import Event

WINDOW = 64
MIN_STEPS = 8
SIGNIFICANT = 3.0
"""Standard errors."""
PATIENCE = 4
"""Schedule periods that a probe may be late before it is made smaller."""
MIN_SHARE = 1 / 16


class Budget:
    """Written by the training thread. `max_overhead` is a share of the step time; 0 sets no limit."""

    def __init__(self, max_overhead: float, every: int) -> None:
        self.share = 1.0
        """Of the modules, measured in one probed step; they take turns."""
        self.n_late = 0
        """Steps by which probes were put off."""
        self.contention_ns = 0
        """A step's loss to the measuring thread, as estimated now."""
        self.total_contention_ns = 0
        self._max_overhead = max_overhead
        self._every = every
        self._balance = 0.0
        self._late = 0
        self._told = False
        self._beside: deque[int] = deque(maxlen=WINDOW)
        self._alone: deque[int] = deque(maxlen=WINDOW)

    def charge(self, step_ns: int, hook_ns: int, *, measuring: bool, probed: bool, slower: bool = False) -> None:
        """Book a step that is over. `measuring`: our thread was at work in it; `slower`: it was run another way."""
        net_ns = step_ns - hook_ns
        if not probed:
            (self._beside if measuring else self._alone).append(net_ns)
            self.contention_ns = loss(self._beside, self._alone) if measuring else self.contention_ns
        lost_ns = self.contention_ns if measuring else 0
        self.total_contention_ns += lost_ns
        if slower and self._alone:
            lost_ns += max(net_ns - int(median(self._alone)), 0)
        self._balance += self._max_overhead * net_ns - hook_ns - lost_ns

    def affords_probe(self) -> bool:
        return not self._max_overhead or self._balance >= 0

    def put_off(self) -> None:
        """A probe that is due has to wait for another step."""
        self.n_late += 1
        self._late += 1

    def begin_probe(self) -> list[Event]:
        """A probe is made now. Return events of what is thinned for the first time, or more than before."""
        late, self._late = self._late, 0
        told: list[Event] = []
        if late and not self._told:
            self._told = True
            words = f"probes come later than every {self._every} steps, to cost {self._max_overhead:.1%} at most"
            told.append(Event("thinned", "", "later", {"every": self._every}, words))
        if late > PATIENCE * self._every and self.share > MIN_SHARE:
            self.share /= 2
            words = f"each probed step measures {self.share:.2%} of the modules, in turn"
            told.append(Event("thinned", "", "in_turn", {"share": self.share}, words))
        return told


def loss(beside: Sequence[int], alone: Sequence[int]) -> int:
    """Median of `beside` less median of `alone`; 0 where that is not beyond the noise, or too few are known."""
    if len(beside) < MIN_STEPS or len(alone) < MIN_STEPS:
        return 0
    difference = median(beside) - median(alone)
    noise = sum(_spread(values) ** 2 / len(values) for values in (beside, alone)) ** 0.5
    return int(difference) if difference > SIGNIFICANT * noise else 0


def _spread(values: Sequence[int]) -> float:
    """Standard deviation by absolute deviations, times 1.25: a median scatters by that much more than a mean."""
    middle = median(values)
    return 1.25 * 1.4826 * median(abs(value - middle) for value in values)
