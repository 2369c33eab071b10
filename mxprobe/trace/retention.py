"""How much of a long run stays at full resolution, and the passes that add up the rest.

A cell is what one row of an operand stands for: a step, or a window of steps that were added up. Beyond `keep` the old
cells are put together to at most `MAX_WINDOWS`; beyond `max_bytes`, pairs of neighbours in the older half of all cells
become one, again and again, until the trace fits. So the older, the wider. Tables that hold no sums stay whole.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mxprobe.errors import TraceError
from mxprobe.tables import THINNED

from . import layout
from .compaction import write_part
from .sources import Source, group_steps
from .thinning import Windows, thinned

MAX_PART_BYTES = 64 * 1024 * 1024
"""Parts are put together up to this size."""
MAX_WINDOWS = 64
"""The verdict tells as many apart."""
MIN_FULL_STEPS = 4
"""Newest probed steps that a full trace still has at full resolution; fewer only where these alone are too much."""
_BEGIN, _END = 0.75, 0.6
"""Shares of `max_bytes`: parts beyond the first are thinned until they are below the second. Live files and the part
that is being written take the rest."""
LIVE_SHARE = 0.1
_TIME_EVERY_S = 1.0

FAILURES = (OSError, TraceError, pa.ArrowException)
"""Rewriting parts may raise these; every row is then where it was."""


@dataclass(frozen=True)
class Retention:
    """None means no limit."""

    keep_steps: int | None = None
    """Steps at full resolution, counted back from the newest."""
    keep_s: float | None = None
    """Seconds at full resolution, counted back from the newest step."""
    max_bytes: int | None = None
    """Disk that the trace may take. It outweighs the others."""


class _OldPart(NamedTuple):
    part: layout.PartFile
    first: int
    """The first step of its first window, and of its last one."""
    last: int
    n_bytes: int
    is_changed: bool

    def precedes(self, other: "_OldPart") -> bool:
        """Return whether the other part comes next."""
        return self.part.rank == other.part.rank and self.part.last + 1 == other.part.first


class RetentionEnforcer:
    """Adds up old steps so that a trace stays within its retention.

    Any one thread may call `observe`; only the one that compacts calls the others.

    Args:
        directory: of the trace; the caller holds the writer's lock.
        retention: what to keep.
        announce: given the windows, as JSON, before any part is rewritten to them.
    """

    def __init__(self, directory: Path, retention: Retention, announce: Callable[[dict[str, Any]], None]) -> None:
        self._directory = directory
        self._retention = retention
        self._announce = announce
        self._windows = Windows(np.empty(0, dtype=np.int64), 0)
        self._lock = threading.Lock()
        self._steps: set[int] = set()
        """Probed steps from `until` on."""
        self._newest = 0
        self._seen: deque[tuple[float, int]] = deque()
        """(seconds, newest step then), as far back as `keep_s` asks."""
        self._made_under: dict[Path, Windows] = {}
        self.excess_bytes = 0
        """The trace is larger than it may be by so much, with nothing left to add up."""

    def observe(self, table: str, steps: Sequence[Any], now_s: float) -> None:
        """Note that rows of these steps were written."""
        if not steps or table not in THINNED:
            return
        known = {step for step in steps if isinstance(step, int)}
        with self._lock:
            self._newest = max(self._newest, *known) if known else self._newest
            if table != "overhead":  # a row for every step: they go with the probed one before
                self._steps.update(step for step in known if step >= self._windows.until)
            if self._retention.keep_s is not None and (not self._seen or now_s - self._seen[-1][0] >= _TIME_EVERY_S):
                self._seen.append((now_s, self._newest))
                while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._retention.keep_s:
                    self._seen.popleft()

    def enforce(self, now_s: float) -> None:
        """Add up what is too old or too much. A file that cannot be rewritten stays as it is."""
        kept_from = self._kept_from(now_s)
        cells = self._cells()
        old = [cell for cell in cells if cell < kept_from]
        if self._retention.keep_steps is not None or self._retention.keep_s is not None:
            merged = old
            while len(merged) > MAX_WINDOWS:
                merged = _halved(merged)
            if len(merged) < len(old):
                self._cut(merged, next((cell for cell in cells if cell >= kept_from), kept_from))
        self._rewrite()
        self._fit(kept_from)

    def apply(self, windows: Windows) -> None:
        """Go on where a writer was stopped."""
        self._windows = windows
        self._rewrite()

    def _fit(self, kept_from: int) -> None:
        limit = self._retention.max_bytes
        if limit is None:
            return
        # The limit outweighs `keep`, and at last the newest steps, too.
        for protected_from, n_full in ((kept_from, MIN_FULL_STEPS), (None, MIN_FULL_STEPS), (None, 1)):
            if self._part_bytes() <= _BEGIN * limit:
                break
            while (size := self._part_bytes()) > _END * limit:
                cells = self._cells()
                old = [cell for cell in cells[:-n_full] if protected_from is None or cell < protected_from]
                if len(old) < 2:
                    break
                to_go = self._part_bytes(THINNED) / len(cells)
                merged = _halved(old)
                while len(merged) > 1 and size - to_go * (len(old) - len(merged)) > _END * limit:
                    merged = _halved(merged)
                self._cut(merged, cells[len(old)])
                self._rewrite()
                if self._part_bytes() >= size:  # nothing to gain: few rows, much per file
                    break
        self.excess_bytes = max(self._part_bytes() - limit, 0)

    def _cells(self) -> list[int]:
        with self._lock:
            return [*self._windows.starts.tolist(), *sorted(self._steps)]

    def _kept_from(self, now_s: float) -> int:
        """Return the first step that `keep` protects."""
        with self._lock:
            newest, seen = self._newest, list(self._seen)
        limits: list[int] = []
        if self._retention.keep_steps is not None:
            limits.append(newest - self._retention.keep_steps + 1)
        if self._retention.keep_s is not None:
            old = [step for at, step in seen if at <= now_s - self._retention.keep_s]
            limits.append(old[-1] + 1 if old else 0)
        return min(limits, default=newest + 1)

    def _cut(self, starts: list[int], until: int) -> None:
        until = max(until, self._windows.until)
        self._windows = Windows(np.array(starts, dtype=np.int64), until)
        with self._lock:
            self._steps = {step for step in self._steps if step >= until}
        self._announce(self._windows.to_json())

    def _rewrite(self) -> None:
        if not self._windows.starts.size:
            return
        known: dict[Path, Windows] = {}
        for table in THINNED:
            for part in layout.covered_parts(self._directory, table):
                part.path.unlink(missing_ok=True)
            for run in self._runs(table):
                with contextlib.suppress(*FAILURES):
                    known[put_together(self._directory, table, run, self._windows)] = self._windows
        self._made_under |= known
        self._made_under = {path: made for path, made in self._made_under.items() if path.exists()}

    def _runs(self, table: str) -> list[list[layout.PartFile]]:
        """List neighbouring parts to put together: those that the windows change, or that have a window in common."""
        runs: list[list[_OldPart]] = []
        for old in self._old_parts(table):
            before = runs[-1][-1] if runs else None
            if (
                before is not None
                and before.precedes(old)
                and (old.is_changed or before.is_changed or old.first == before.last)
                and sum(each.n_bytes for each in runs[-1]) + old.n_bytes <= self._max_part_bytes
            ):
                runs[-1].append(old)
            else:
                runs.append([old])
        return [[old.part for old in run] for run in runs if len(run) > 1 or run[0].is_changed]

    def _old_parts(self, table: str) -> Iterator["_OldPart"]:
        """Yield the parts with steps that are added up; what cannot be read is left alone."""
        for part in layout.part_files(self._directory, table):
            with contextlib.suppress(*FAILURES):
                file = Source(part.path, part.rank, is_live=False, hold=False).parquet()
                groups = [found for group in range(file.num_row_groups) if (found := group_steps(file, group))]
                first, last = min((each[0] for each in groups), default=0), max((each[1] for each in groups), default=0)
                if not groups or first >= self._windows.until:
                    continue
                made = self._made_under.get(part.path)
                is_changed = made is None or not made.agrees(self._windows, first, last)
                windows = self._windows.first_of(np.array([first, last]))
                yield _OldPart(part, int(windows[0]), int(windows[1]), part.path.stat().st_size, is_changed)

    @property
    def _max_part_bytes(self) -> int:
        limit = self._retention.max_bytes
        return MAX_PART_BYTES if limit is None else min(MAX_PART_BYTES, limit // 8)

    def _part_bytes(self, tables: Sequence[str] | None = None) -> int:
        total = 0
        for folder, _, names in os.walk(self._directory):
            table = Path(folder).parent.name
            if table == layout.LIVE_DIRECTORY or (tables is not None and table not in tables):
                continue
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total


def put_together(directory: Path, table: str, parts: Sequence[layout.PartFile], windows: Windows) -> Path:
    """Write one part in the place of neighbouring ones, old steps added up; return its path.

    The new part takes its name, which says what it holds, before the others go: readers prefer it.

    Raises:
        one of `FAILURES`: nothing has changed.
    """
    final = layout.part_path(directory, table, parts[0].rank, parts[0].first, parts[-1].last)
    held = [Source(part.path, part.rank, is_live=False, hold=True) for part in parts]
    write_part(final, table, thinned(table, (rows for source in held for rows in source.pieces(table)), windows))
    for part in parts:
        if part.path != final:
            part.path.unlink(missing_ok=True)
    return final


def _halved(cells: list[int]) -> list[int]:
    """Join pairs of neighbours in the older half; at least one pair."""
    n_pairs = max(len(cells) // 4, 1)
    return [*cells[: 2 * n_pairs : 2], *cells[2 * n_pairs :]]
