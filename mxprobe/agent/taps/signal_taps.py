"""Training metrics, from the sinks that frameworks and loggers already call: rows of table `signals`.

Sinks are looked for in `sys.modules`, at attach and at each step boundary. An import hook would also see a sink that
is imported later, but it would sit in `sys.meta_path` and run at every import of the user's process; a look costs a
few microseconds a step and misses at most what is logged between the import and the next boundary.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

from mxprobe.agent.taps.scalars import is_on_device, scalar
from mxprobe.agent.taps.splicing import Splices, is_loaded, wrapped
from mxprobe.agent.taps.tap_table import FRAMEWORK_PACKAGES, TAPS, Tap
from mxprobe.events import Event, Tell
from mxprobe.schema import Row

NO_STEP = -1
"""`step` of rows whose call named none: to be placed by their time."""

ECHO_NS = 1_000_000_000
"""The same value under the same key from another sink within so long is the same number logged twice."""

Emit = Callable[["list[Row]"], None]


class SignalTaps:
    """Every sink of the table that the process has. Callable from any thread; nothing raises.

    emit(rows): the numbers of one call, `metric` and `estimator` left empty.
    tell: takes `tap` events, which say what is tapped, what could not be, what was left out.
    on_error(where, error): a call could not be read.
    """

    def __init__(
        self,
        emit: Emit,
        on_error: Callable[[str, BaseException], None],
        tell: Tell,
        taps: tuple[Tap, ...] = TAPS,
    ) -> None:
        self.n_on_device = 0
        """Values left out because they lay on a device; reading them would have made the run wait."""
        self._emit = emit
        self._on_error = on_error
        self._tell = tell
        self._splices = Splices(
            taps,
            self._listen,
            on_wrapped=lambda tap: tell(wrapped(tap, _version(tap.package))),
            on_refused=tell,
            on_error=on_error,
        )
        self._pid = os.getpid()
        self._told: set[str] = set()
        self._last: dict[str, tuple[str, float, int, int]] = {}
        """Key -> (source, value, step, time) of the last row."""
        self._spent_ns = 0

    def ensure_wrapped(self) -> None:
        """Tap what has been imported by now; cheap enough for every step, and never waits."""
        self._splices.ensure_wrapped()

    def unwrap(self) -> None:
        """Give every function back; where somebody has wrapped ours since, ours turns into a plain call."""
        for event in self._splices.give_back():
            self._tell(event)
        if self.n_on_device:
            words = f"{self.n_on_device} values on a device were not recorded"
            self._tell(Event("tap", "", "on_device", {"n": self.n_on_device}, words))

    def take_ns(self) -> int:
        """Time spent listening since the last call, in the threads that log."""
        spent, self._spent_ns = self._spent_ns, 0
        return spent

    def _listen(self, tap: Tap, arguments: dict[str, Any]) -> bool:
        started = time.perf_counter_ns()
        try:
            if os.getpid() == self._pid:  # in a forked child nobody is there to take a row
                rows = self._rows(tap, arguments)
                if rows:
                    self._emit(rows)
            return True
        except Exception as error:
            self._on_error(tap.source, error)
            return False
        finally:
            self._spent_ns += time.perf_counter_ns() - started

    def _rows(self, tap: Tap, arguments: dict[str, Any]) -> list[Row]:
        now = time.time_ns()
        rows: list[Row] = []
        for reading in tap.read(arguments):
            step = NO_STEP if reading.step is None else reading.step
            shared = {
                "step": step,
                "time_ns": now,
                "source": f"{tap.source}[{reading.counter}]" if reading.counter else tap.source,
                "framework": reading.framework or (_framework_in_use() if tap.is_logger else "") or tap.framework,
            }
            for key, value in reading.data.items():
                number = scalar(value)
                if number is not None:
                    if not self._is_echo(tap, str(key), number, step, now):
                        rows.append({**shared, "raw_key": str(key), "metric": "", "estimator": "", "value": number})
                elif is_on_device(value):
                    self._leave_out(tap, str(key))
        return rows

    def _is_echo(self, tap: Tap, key: str, value: float, step: int, now: int) -> bool:
        """True where another sink has just been given this number: a script that logs to two loggers in turn."""
        if key in self._last:
            source, last, at, then = self._last[key]
            same_value = value == last or (value != value and last != last)
            same_step = step == at or NO_STEP in (step, at)
            if source != tap.source and same_value and same_step and now - then < ECHO_NS:
                return True
        self._last[key] = (tap.source, value, step, now)
        return False

    def _leave_out(self, tap: Tap, key: str) -> None:
        self.n_on_device += 1
        if tap.source not in self._told:
            self._told.add(tap.source)
            words = f"{tap.source} logs {key} as a tensor on a device: such values are not recorded"
            self._tell(Event("tap", tap.source, "on_device", {"key": key}, words))


def any_sink(taps: tuple[Tap, ...] = TAPS) -> bool:
    """Whether this process has imported something that metrics are logged to."""
    return any(is_loaded(tap.module) for tap in taps)


def _framework_in_use() -> str:
    """The RL framework of this process, where exactly one is imported."""
    found = {framework for package, framework in FRAMEWORK_PACKAGES.items() if package in sys.modules}
    return found.pop() if len(found) == 1 else ""


def _version(package: str) -> str:
    module = sys.modules.get(package)
    version = vars(module).get("__version__") if module is not None else None
    return f"{package} {version}" if isinstance(version, str) else package
