"""What a curve did: its trend, and the one step that explains it better than a straight line would.

A change of one run is associated with what happened then, not caused by it: the page says so in each line.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mxprobe.attribution.trends import ALPHA, Step, find_step, mann_kendall
from mxprobe.numbers import p_value


@dataclass(frozen=True)
class Change:
    """`at` is the first step after the change point, `step` its levels and test; None where there is none."""

    trend: str
    """`rising`, `falling` or `flat`."""
    trend_p: float
    at: int | None = None
    step: Step | None = None

    def words(self, show: Callable[[float], str]) -> str:
        """Return trend and step in one line; `show` spells the levels."""
        words = "no trend" if self.trend == "flat" else f"{self.trend}, p {p_value(self.trend_p)}"
        if self.step is not None:
            levels = f"{show(self.step.before)} to {show(self.step.after)}"
            words += f"; step at {self.at}: {levels}, p {p_value(self.step.p)}"
        return words


def find(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Change | None:
    """Test for a trend and a step, both aware of autocorrelation. None with fewer than 8 finite values."""
    finite = np.isfinite(values)
    trend, step = mann_kendall(values), find_step(values)
    if trend is None:
        return None
    if step is None or not step.p < ALPHA or not _beats_a_line(values[finite], step.at):
        return Change(trend.direction(), trend.p)
    return Change(trend.direction(), trend.p, int(steps[finite][step.at]), step)


def _beats_a_line(y: npt.NDArray[np.float64], at: int) -> bool:
    t = np.arange(y.size)
    line = y - np.polyval(np.polyfit(t, y, 1), t)
    step = np.concatenate([y[:at] - y[:at].mean(), y[at:] - y[at:].mean()])
    return float(step @ step) < float(line @ line)
