"""What attaching costs the run, as ratios measured in one go.

    python benchmarks/overhead.py [--pairs 5] [--steps 20]     main-thread CPU time of a model with steps of a second
    python benchmarks/overhead.py --demo [--pairs 3]           wall time of the demo's GRPO job

The first attaches to a running process and detaches again, over and over, with the default schedule. Each pair holds
the steps with mxprobe (from its second on: the first is the one it watches) against as many without, right after them.
One step of the first is probed, weights included; the default schedule probes one in 50, so that its cost is that of
the steps not probed, and a fiftieth of what the probed one costs more. Intervals are Student's t over pairs.

The second runs the job with and without, each pair back to back, and prints the share of the step spent in our hooks
as mxprobe measures it itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mxprobe.demo.runner import PROBE_EVERY, Scenario, job_command, read_steps, running
from mxprobe.protocol import AgentConfig
from mxprobe.trace import open_trace

DEFAULT = AgentConfig()
SCHEDULES = {
    f"default (every {DEFAULT.every}, weights every {DEFAULT.weights_every})": (DEFAULT.every, DEFAULT.weights_every),
    f"demo (every {PROBE_EVERY}, weights every {PROBE_EVERY})": (PROBE_EVERY, PROBE_EVERY),
}
T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t by degrees of freedom."""

# Writes for each step: its number as the optimizer counts, CPU seconds of the main thread, seconds.
TARGET = """
import os, sys, time
import torch
from torch import nn
out, n_tokens = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))
model = nn.Sequential(*[Block() for _ in range(6)], nn.Linear(512, 1024))
optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
log, step = open(out, "w", buffering=1), 0
while True:
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    x = torch.randn(n_tokens // 128, 128, 512)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    log.write(f"{step} {time.thread_time() - cpu_s} {time.perf_counter() - wall_s}\\n")
"""


class Target:
    """A model that trains until it is killed."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process = process
        self._out = out

    def steps(self) -> dict[int, tuple[float, float]]:
        """Step -> (CPU seconds of the main thread, seconds)."""
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        complete = [line.split() for line in lines if line.count(" ") == 2]
        return {int(step): (float(cpu_s), float(wall_s)) for step, cpu_s, wall_s in complete}

    def wait_for(self, n: int) -> int:
        """Let n more steps pass; returns the last."""
        goal = max(self.steps(), default=0) + n
        while max(self.steps(), default=0) < goal:
            if self.process.poll() is not None:
                raise SystemExit("the model's process ended")
            time.sleep(0.05)
        return goal


def mxprobe(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "mxprobe", *arguments], check=True, capture_output=True)


def measure_pair(target: Target, trace: Path, n_steps: int) -> tuple[float, float, float]:
    """(CPU ratio attached / not, the same of steps not probed, share of the step time in hooks by our own account)."""
    pid = str(target.process.pid)
    mxprobe("attach", pid, "-o", str(trace), "--background")
    last = target.wait_for(n_steps + 2)
    mxprobe("detach", pid)
    first_alone = target.wait_for(1) + 1
    target.wait_for(n_steps + 1)
    overhead = open_trace(trace).overhead().set_index("step")
    steps = target.steps()
    attached = [step for step in overhead.index if step <= last][:n_steps]
    base = statistics.mean(steps[step][0] for step in range(first_alone, first_alone + n_steps))
    probed = [steps[step][0] / base for step in attached if overhead.probed[step]]
    quiet = statistics.mean(steps[step][0] / base for step in attached if not overhead.probed[step])
    share = float(overhead.probe_ns[~overhead.probed].mean() / overhead.step_ns.median())
    share += float(overhead.probe_ns[overhead.probed].mean() / overhead.step_ns.median() - share) / DEFAULT.every
    return quiet + (statistics.mean(probed) - quiet) / DEFAULT.every, quiet, share


def interval(ratios: Sequence[float]) -> str:
    """Mean and the 95 % interval of a ratio less one."""
    mean = statistics.mean(ratios) - 1
    half = T_975.get(len(ratios) - 1, 2.2) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{mean:+.2%} ({mean - half:+.2%} to {mean + half:+.2%})"


def measure_model(pairs: int, n_steps: int, n_tokens: int) -> None:
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "steps")
        command = [sys.executable, "-c", TARGET, str(out), str(n_tokens)]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            target = Target(process, out)
            target.wait_for(5)
            measured: list[tuple[float, float, float]] = []
            for i in range(pairs):
                measured.append(measure_pair(target, Path(name, f"{i}.mxprobe"), n_steps))
                print(f"pair {i + 1} of {pairs}: {measured[-1][0] - 1:+.2%}", file=sys.stderr, flush=True)
            seconds = statistics.median(wall_s for _, wall_s in target.steps().values())
        finally:
            process.kill()
            process.wait()
    attached, quiet, shares = zip(*measured, strict=True)
    print(
        f"{pairs} pairs of {n_steps} steps of {seconds:.2f} s; load average {before:.1f} to {os.getloadavg()[0]:.1f}\n"
    )
    print("| | main-thread CPU time, 95 % interval |")
    print("|---|---|")
    print(f"| default schedule | {interval(attached)} |")
    print(f"| of these, steps that are not probed | {interval(quiet)} |")
    print(f"| in our hooks, by our own account (wall time) | {statistics.mean(shares):.2%} |")


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


def measure_demo(pairs: int, steps: int) -> None:
    print("| schedule | attached / unattached, median of pairs (range) | in hooks, of step time |")
    print("|---|---|---|")
    for name, schedule in SCHEDULES.items():
        ratios: list[float] = []
        shares: list[float] = []
        for _ in range(pairs):
            with tempfile.TemporaryDirectory() as control, tempfile.TemporaryDirectory() as attached:
                base, _ = job_seconds(Path(control), steps=steps, schedule=None)
                seconds, share = job_seconds(Path(attached), steps=steps, schedule=schedule)
            ratios.append(seconds / base)
            shares.append(share)
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {name} | {spread} | {statistics.median(shares):.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each half of a pair")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, which sets its length")
    parser.add_argument("--demo", action="store_true")
    options = parser.parse_args()
    if options.demo:
        measure_demo(options.pairs, options.steps or 250)
    else:
        measure_model(options.pairs, options.steps or 20, options.tokens)


if __name__ == "__main__":
    main()
