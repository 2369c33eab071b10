"""How long from `mxprobe attach PID` to the first statistic on disk, on the demo's GRPO job.

    python benchmarks/first_statistic.py [--times 5]

The clock starts with the command, Python's own start included, and stops when the first row of table `tensors` is in
the trace. The first step after attaching is the one that is probed, so that two steps of the job are in the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mxprobe.demo.runner import Scenario, job_command, read_steps, running
from mxprobe.trace import open_trace

PATIENCE_S = 120.0


def seconds_to_first_row(pid: int, trace: Path) -> float:
    command = [sys.executable, "-m", "mxprobe", "attach", str(pid), "-o", str(trace)]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as attach:
        while not any(file.stat().st_size for file in trace.glob("live/rank=*/tensors-*.arrows")):
            if attach.poll() is not None or time.monotonic() - started > PATIENCE_S:
                raise SystemExit("no statistic came")
            time.sleep(0.005)
        seconds = time.monotonic() - started
        subprocess.run([sys.executable, "-m", "mxprobe", "detach", str(pid)], check=True, capture_output=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "job")
        command = job_command(Scenario.OUTLIERS, seed=0, out=directory, steps=100_000)
        with running(command, Path(name, "log")) as job:
            while len(read_steps(directory / "metrics.jsonl")) < 5:
                if job.poll() is not None:
                    raise SystemExit(Path(name, "log").read_text())
                time.sleep(0.05)
            traces = [Path(name, f"{number}.mxprobe") for number in range(times)]
            found = sorted(seconds_to_first_row(job.pid, trace) for trace in traces)
            job.kill()
        step_ms = float(open_trace(traces[-1]).overhead().step_ns.median() / 1e6)
    spread = f"{found[0]:.2f} to {found[-1]:.2f}"
    load = f"load average {before:.1f} to {os.getloadavg()[0]:.1f}"
    print(f"{statistics.median(found):.2f} s ({spread}, {times} times), steps of {step_ms:.0f} ms, {load}")


if __name__ == "__main__":
    main()
