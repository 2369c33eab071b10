"""What the probe cost: time in the training thread, time beside it, what was sent and what was lost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from markupsafe import Markup

from mxprobe.numbers import NOTHING, duration, file_size, percent

from .rendering import render

Array = npt.NDArray[np.float64]

PERIOD = 200
"""Steps that the cost of one replay is related to: by default there is one for sensitivity in so many."""
PROBES = 4
"""Probed steps in `PERIOD` steps of the default schedule."""


@dataclass(frozen=True)
class Overhead:
    """Times in seconds, one per timed step of rank 0, in the order of steps."""

    step_s: Array
    hooks_s: Array
    is_probed: npt.NDArray[np.bool_]
    measuring_s: float
    """In the agent's own thread, over the whole run; NaN where the trace does not say."""
    attached_s: float
    n_dropped: int
    n_errors: int
    sent_bytes: int
    replay_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Kind of replay -> median time of one in the training thread."""
    told: tuple[tuple[str, str], ...] = ()
    """What the agent says of kernels, memory and the device's own clock."""

    def of_period(self, seconds: float) -> float:
        """Return what takes so long once in `PERIOD` steps, as a share of their time without us."""
        rest = float(np.median(self.step_s - self.hooks_s)) * PERIOD
        return seconds / rest if rest > 0 else float("nan")

    @property
    def default_frac(self) -> float:
        """Time in our hooks over `PERIOD` steps of the default schedule, from the medians of this run; NaN where it
        probed no step or replayed none for sensitivity."""
        if not self.is_probed.any() or self.is_probed.all() or SENSITIVITY not in self.replay_s:
            return float("nan")
        probe, other = (float(np.median(self.hooks_s[chosen])) for chosen in (self.is_probed, ~self.is_probed))
        return self.of_period(PROBES * probe + (PERIOD - PROBES) * other + self.replay_s[SENSITIVITY])

    @property
    def hooks_frac(self) -> float:
        """Time in our hooks over the rest of the steps' time."""
        rest = self.step_s.sum() - self.hooks_s.sum()
        return float(self.hooks_s.sum() / rest) if rest > 0 else float("nan")

    def median_s(self, chosen: npt.NDArray[np.bool_]) -> float:
        return float(np.median(self.step_s[chosen])) if chosen.any() else float("nan")


SENSITIVITY, ARMS = "sensitivity", "other roundings"
_TOLD = (("kernels", "kernels"), ("memory of the device", "memory"), ("steps on the device", "device_steps"))


def of(
    frame: pd.DataFrame,
    run: Mapping[str, Any],
    *,
    sensitivity: Iterable[int] = (),
    replays: Iterable[int] = (),
) -> Overhead:
    """Read the cost. sensitivity, replays: the steps that were replayed for each."""
    rows = frame.sort_values("step", kind="stable")
    # A row may add up several steps: then each of them is taken to be like their mean.
    n_steps = rows["n_steps"].fillna(1).to_numpy(dtype=int) if "n_steps" in rows else np.ones(len(rows), dtype=int)
    numbers = rows[["step_ns", "probe_ns"]].apply(pd.to_numeric).to_numpy(dtype=float) / 1e9 / n_steps[:, None]
    timed = np.isfinite(numbers).all(axis=1) & (numbers[:, 0] > 0)
    if "rank" in rows:
        timed &= rows["rank"].to_numpy() == rows["rank"].min()
    ended = rows.drop_duplicates("rank", keep="last") if "rank" in rows else rows.tail(1)
    sums = {name: int(pd.to_numeric(ended[name]).fillna(0).sum()) for name in ("n_dropped", "n_errors", "sent_bytes")}
    agent: Any = run.get("agent")
    known: Mapping[str, Any] = agent if isinstance(agent, Mapping) else {}
    return Overhead(
        step_s=np.repeat(numbers[timed, 0], n_steps[timed]),
        hooks_s=np.repeat(numbers[timed, 1], n_steps[timed]),
        is_probed=np.repeat(rows["probed"].fillna(False).astype(bool).to_numpy()[timed], n_steps[timed]),
        measuring_s=float(known.get("measure_ns", np.nan)) / 1e9,
        attached_s=float(known.get("step_ns", np.nan)) / 1e9,
        **sums,
        told=tuple((name, str(known[key])) for name, key in _TOLD if known.get(key)),
        replay_s=_replay_seconds(
            rows["step"].to_numpy(dtype=int)[timed & (n_steps == 1)],
            numbers[timed & (n_steps == 1), 1],
            {SENSITIVITY: set(sensitivity) - set(replays), ARMS: set(replays)},
        ),
    )


def _replay_seconds(steps: npt.NDArray[np.int_], hooks_s: Array, replayed: Mapping[str, set[int]]) -> dict[str, float]:
    """Return kind -> seconds of one. A replay runs after its step has been timed, and is booked on the next one."""
    found: dict[str, float] = {}
    for kind, at in replayed.items():
        seconds = hooks_s[np.isin(steps - 1, sorted(at))]
        if seconds.size:
            found[kind] = float(np.median(seconds))
    return found


def section(overhead: Overhead) -> Markup:
    """Return the card; it says so where no step was timed."""
    shares = [(overhead.hooks_frac, "in the training thread: time in our hooks over the rest of the steps")]
    if np.isfinite(overhead.measuring_s) and overhead.attached_s > 0:
        words = "beside it: time of our measuring thread over the attached time; on busy cores it slows the training"
        shares.append((overhead.measuring_s / overhead.attached_s, words))
    return render("overhead.html", shares=shares, entries=_entries(overhead) if overhead.step_s.size else [])


def _entries(overhead: Overhead) -> list[tuple[str, str]]:
    probed = overhead.is_probed
    after, before = np.roll(probed, 1), np.roll(probed, -1)
    after[:1] = before[-1:] = False
    hooks = [overhead.hooks_s[chosen] for chosen in (probed, ~probed)]
    in_hooks = [duration(float(np.median(part))) if part.size else NOTHING for part in hooks]
    when = {"probed": probed, "just after a probed one": after & ~probed, "just before one": before & ~probed}
    share = overhead.default_frac
    default = f"{percent(share)} of {PERIOD} steps: {PROBES} probes and a replay for sensitivity, from these medians"
    return [
        ("steps timed", f"{probed.size}, {int(probed.sum())} of them probed"),
        ("in our hooks, median", f"{in_hooks[0]} in a probed step, {in_hooks[1]} in others"),
        *((f"step {name}, median", duration(overhead.median_s(chosen))) for name, chosen in when.items()),
        *(
            (f"a replay for {kind}, median", f"{duration(s)}, {percent(overhead.of_period(s))} of {PERIOD} steps")
            for kind, s in overhead.replay_s.items()
        ),
        *([("default schedule, in our hooks", default)] if np.isfinite(share) else []),
        *overhead.told,
        ("rows dropped", f"{overhead.n_dropped}"),
        ("errors swallowed", f"{overhead.n_errors}"),
        ("sent", file_size(overhead.sent_bytes)),
    ]
