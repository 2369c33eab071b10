"""What a metric tap costs: one call with 30 metrics through a tapped sink, and one look for new sinks.

    python benchmarks/taps.py

Prints the median over repeats, in microseconds, of the time that a call takes longer when tapped; of the time that
`ensure_wrapped` takes at a step boundary when nothing new was imported; and, per step of `--step-ms`, their share.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mxprobe.agent.taps.signal_taps import SignalTaps

CALLS = 2_000
REPEATS = 15
METRICS = {f"metric/{i}": i + 0.5 for i in range(30)}


class Tracking:
    """A sink of verl's signature that does nothing."""

    def log(self, data: Any, step: Any, backend: Any = None) -> None:
        pass


def microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - started) / CALLS / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=50.0, help="length of the step that the share is taken of")
    step_ms = parser.parse_args().step_ms
    module = ModuleType("verl.utils.tracking")
    vars(module)["Tracking"] = Tracking
    sys.modules["verl.utils.tracking"] = module
    sink = Tracking()
    plain, tapped, looks = [], [], []
    for _ in range(REPEATS):
        taps = SignalTaps(lambda rows: None, lambda where, error: None, lambda event: None)
        plain.append(microseconds(lambda: sink.log(METRICS, step=1)))
        taps.ensure_wrapped()
        tapped.append(microseconds(lambda: sink.log(METRICS, step=1)))
        looks.append(microseconds(taps.ensure_wrapped))
        taps.unwrap()
    call = statistics.median(tapped) - statistics.median(plain)
    look = statistics.median(looks)
    print(f"a call with {len(METRICS)} metrics, tapped: {call:.1f} us more")
    print(f"a look for new sinks:            {look:.1f} us")
    print(f"both, of a {step_ms:g} ms step:        {(call + look) / step_ms / 10:.3f} %")


if __name__ == "__main__":
    main()
