"""What attaching costs the run: the demo's GRPO job with and without mxprobe, as ratios measured in one go.

    python benchmarks/overhead.py [--pairs 3] [--steps 250]

Prints, per schedule, the job's wall time attached over unattached (each pair back to back, so that a drifting
machine cancels) and the share of the step spent in our hooks as mxprobe measures it itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mxprobe.demo.runner import PROBE_EVERY, Scenario, job_command, read_steps, running
from mxprobe.protocol import AgentConfig
from mxprobe.trace import open_trace

DEFAULT = AgentConfig()
SCHEDULES = {
    f"default (every {DEFAULT.every}, weights every {DEFAULT.weights_every})": (DEFAULT.every, DEFAULT.weights_every),
    f"demo (every {PROBE_EVERY}, weights every {PROBE_EVERY})": (PROBE_EVERY, PROBE_EVERY),
}


def job_seconds(directory: Path, *, steps: int, schedule: tuple[int, int] | None) -> tuple[float, float]:
    """(training seconds of the job, share of the attached steps' time spent in hooks)."""
    job_directory, trace = directory / "job", directory / "trace.mxprobe"
    command = job_command(Scenario.OUTLIERS, seed=0, out=job_directory, steps=steps)
    with running(command, directory / "job.log") as job:
        if schedule is not None:
            while not read_steps(job_directory / "metrics.jsonl"):
                time.sleep(0.05)
                if job.poll() is not None:
                    raise SystemExit((directory / "job.log").read_text())
            every, weights_every = schedule
            attach = [sys.executable, "-m", "mxprobe", "attach", str(job.pid), "-o", str(trace)]
            options = ["--every", str(every), "--weights-every", str(weights_every)]
            subprocess.run([*attach, *options], check=True, capture_output=True)
        job.wait()
    seconds = json.loads((job_directory / "result.json").read_text())["seconds"]
    if schedule is None:
        return seconds, 0.0
    overhead = open_trace(trace).overhead()
    return seconds, float(overhead.probe_ns.sum() / overhead.step_ns.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    print("| schedule | attached / unattached, median of pairs (range) | in hooks, of step time |")
    print("|---|---|---|")
    for name, schedule in SCHEDULES.items():
        ratios: list[float] = []
        shares: list[float] = []
        for _ in range(options.pairs):
            with tempfile.TemporaryDirectory() as control, tempfile.TemporaryDirectory() as attached:
                base, _ = job_seconds(Path(control), steps=options.steps, schedule=None)
                seconds, share = job_seconds(Path(attached), steps=options.steps, schedule=schedule)
            ratios.append(seconds / base)
            shares.append(share)
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {name} | {spread} | {statistics.median(shares):.1%} |", flush=True)


if __name__ == "__main__":
    main()
