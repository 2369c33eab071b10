"""What a curve did: its trend, and the one step that explains it better than a straight line would.

A change of one run is associated with what happened then, not caused by it: the page says so in each line.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mxprobe.attribution.trends import ALPHA, find_step, mann_kendall
from mxprobe.numbers import number


@dataclass(frozen=True)
class Change:
    """`at` is the first step after the change point; it and the levels are None where there is none."""

    trend: str
    """`rising`, `falling` or `flat`."""
    trend_p: float
    at: int | None = None
    before: float | None = None
    after: float | None = None
    p: float | None = None

    def words(self, show: Callable[[float], str]) -> str:
        """Return trend and step in one line; `show` spells the levels."""
        words = "no trend" if self.trend == "flat" else f"{self.trend}, p {_p(self.trend_p)}"
        if self.at is not None and self.before is not None and self.after is not None and self.p is not None:
            words += f"; step at {self.at}: {show(self.before)} to {show(self.after)}, p {_p(self.p)}"
        return words


def find(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Change | None:
    """Test for a trend and a step, both aware of autocorrelation. None with fewer than 8 finite values."""
    finite = np.isfinite(values)
    trend = mann_kendall(values)
    if trend is None:
        return None
    direction = trend.direction()
    step = find_step(values)
    if step is None or not step.p < ALPHA or not _beats_a_line(values[finite], step.at):
        return Change(direction, trend.p)
    return Change(direction, trend.p, int(steps[finite][step.at]), step.before, step.after, step.p)


def _beats_a_line(y: npt.NDArray[np.float64], at: int) -> bool:
    t = np.arange(y.size)
    line = y - np.polyval(np.polyfit(t, y, 1), t)
    step = np.concatenate([y[:at] - y[:at].mean(), y[at:] - y[at:].mean()])
    return float(step @ step) < float(line @ line)


def _p(value: float) -> str:
    return "< 0.001" if value < 1e-3 else number(value)
