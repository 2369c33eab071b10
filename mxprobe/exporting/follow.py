"""Curves into a tracker while the trace is being written: each value once, and a step only when it is whole.

A logged metric goes out as soon as it is read. Curves made of a step's rows (errors per kind, mismatch, overhead) wait
until the step is settled: every rank has written an `overhead` row of a later step, which the agent sends after the
rows of the step before, and the tail has read all that was written by then. When the recording ends, all that waits
goes out.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from mxprobe.trace.tail import TraceTail

from .series import COLUMNS, Point, keys_of, placed, points, signal_rows, step_rows
from .trackers import Tracker, no_curve, open_run

QUIET_S = 60.0
"""A rank that has written nothing for so long while others went on (it left, or died) is not waited for."""
_REMEMBERED_STEPS = 1000
_STEP_TABLES = ("tensors", "outputs", "overhead")


class Follower:
    """Turns what a tail reads into points to log. `n_late` counts rows of steps that had been logged already."""

    def __init__(self, modules: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.n_late = 0
        self._modules = modules
        self._clock = clock
        self._waiting = {name: pd.DataFrame(columns=list(COLUMNS[name])) for name in _STEP_TABLES}
        self._steps: pd.DataFrame = pd.DataFrame(columns=["step", "time_ns"])
        """The last steps with their times, for metrics that were logged without one."""
        self._last: dict[int, tuple[int, float]] = {}
        """Rank -> its last step and when it was read."""
        self._settled: int | None = None
        """The last step that has been logged."""
        self._keys: dict[str, set[str]] = {}
        self._logged: dict[str, dict[int, None]] = {}
        """Tag -> the last steps logged of it."""

    def take(self, rows: Sequence[tuple[str, int, pd.DataFrame]], *, is_behind: bool = False) -> Iterator[Point]:
        """Yield the points that are ready after a poll. `is_behind`: the poll left out rows that are on the disk."""
        # By what the polls before have seen: rows that were on the disk then have been read by now.
        through = None if is_behind else self._settled_through()
        signals = [frame for name, _, frame in rows if name == "signals"]
        for name, rank, frame in rows:
            if name in self._waiting:
                self._keep(name, frame.assign(rank=rank))
            if name == "overhead" and len(frame):
                self._last[rank] = (int(frame["step"].max()), self._clock())
                self._steps = pd.concat([self._steps, frame[["step", "time_ns"]]])[-_REMEMBERED_STEPS:]
        yield from self._ready([self._signals(pd.concat(signals))] if signals else [], through)

    def rest(self) -> Iterator[Point]:
        """Yield all that waits, once nothing more will come."""
        newest = [int(frame["step"].max()) for frame in self._waiting.values() if len(frame)]
        yield from self._ready([], max(newest, default=None))

    def _keep(self, name: str, frame: pd.DataFrame) -> None:
        if self._settled is not None:
            is_late = frame["step"] <= self._settled
            self.n_late += int(is_late.sum())
            frame = frame[~is_late]
        if len(frame):
            waiting = self._waiting[name]
            self._waiting[name] = pd.concat([waiting, frame], ignore_index=True) if len(waiting) else frame

    def _settled_through(self) -> int | None:
        if not self._last:
            return None
        newest = max(at for _, at in self._last.values())
        return min(step for step, at in self._last.values() if newest - at < QUIET_S) - 1

    def _signals(self, rows: pd.DataFrame) -> pd.DataFrame:
        for metric, keys in keys_of(rows).items():
            self._keys.setdefault(metric, set()).update(keys)
        rows = signal_rows(placed(rows, self._steps), self._keys)
        return rows[[self._is_new(str(tag), int(step)) for tag, step in zip(rows["tag"], rows["step"], strict=True)]]

    def _is_new(self, tag: str, step: int) -> bool:
        steps = self._logged.setdefault(tag, {})
        if step in steps:
            return False
        steps[step] = None
        if len(steps) > _REMEMBERED_STEPS:
            del steps[next(iter(steps))]
        return True

    def _ready(self, parts: list[pd.DataFrame], through: int | None) -> Iterator[Point]:
        if through is not None and (self._settled is None or through > self._settled):
            whole = {name: frame[frame["step"] <= through] for name, frame in self._waiting.items()}
            self._waiting = {name: frame[frame["step"] > through] for name, frame in self._waiting.items()}
            self._settled = through
            parts = [*parts, *step_rows(whole, self._modules)]
        yield from points(parts)


def follow_to(
    tracker: Tracker,
    trace: Path,
    *,
    project: str,
    name: str,
    directory: Path,
    modules: Sequence[str] = (),
    interval_s: float = 2.0,
    say: Callable[[str], None],
) -> str:
    """Log the curves of a trace as they come, until it is closed, its writer has died, or Ctrl-C.

    Returns where the run is; arguments as for `export_to`. `say` gets sentences for the user.

    Raises:
        UsageError: the library is not installed or refuses, or there was no curve to log.
        TraceError: no readable trace, or a damaged table.
    """
    tail = TraceTail(trace, {table: list(columns) for table, columns in COLUMNS.items()})
    run = open_run(tracker, tail.run, project=project, name=name, directory=directory)
    follower = Follower(modules)
    n_points = 0
    try:
        for rows in tail.follow(interval_s):
            for point in follower.take(rows, is_behind=bool(rows) and tail.is_behind):
                run.log(point)
                n_points += 1
        for point in follower.rest():
            run.log(point)
            n_points += 1
    except KeyboardInterrupt:
        say("interrupted: what was recorded since is not in the run")
    finally:
        where = run.close()
    if tail.state == "writer died":
        say("the writer died before closing the trace; what it wrote is in the run")
    if follower.n_late:
        say(
            f"{follower.n_late} rows were written after their step had been logged, and are left out; export the trace "
            "again without --follow to have all"
        )
    if not n_points:
        raise no_curve(trace)
    return where
