"""What attaching costs the run, as ratios measured in one go.

    python benchmarks/overhead.py [--pairs 3] [--rounds 20]    main-thread CPU time of a model with steps of a second
    python benchmarks/overhead.py --whole [--pairs 3]          the same model, 200 whole steps by the default schedule
    python benchmarks/overhead.py --demo [--pairs 3]           wall time of the demo's GRPO job

The first attaches to a running process and detaches again, over and over: stretches without mxprobe before and after
each attach give the base that it is held against, so that a drift of the machine cancels. What the default schedule
does in 200 steps (one probe with weights, three without, one replay for sensitivity) is brought about in a few dozen
by two attaches, a pair: one probes every `--window` steps, the other replays after as many. The cost of an event is
what its step, and the steps beside the thread that measures it, took beyond the base. What hooks cost where nothing is
measured does not depend on the size of a layer, and would be lost in the drift of the machine at steps of a second: it
is taken from a narrow model with the same modules and steps of some milliseconds, in many short attaches, the rounds,
as the difference of median steps to those before and after. Then

    overhead = (hooks + weights probe + 3 probes + sensitivity in 200 steps) / 200 steps

Intervals are Student's t over pairs and rounds; that of the sum adds theirs in squares.

The second extrapolates nothing: an attach without options but where the trace goes, 200 steps with their probes, their
replay for sensitivity and the limit of `--max-overhead`, between stretches without mxprobe of a quarter as many; means
of the steps' CPU and wall time over those of the stretches, and the time in hooks by the trace. Six minutes a pair.

The third runs the job with and without, each pair back to back, and prints the share of the step spent in our hooks
as mxprobe measures it itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from mxprobe.demo.runner import PROBE_EVERY, Scenario, job_command, read_steps, running
from mxprobe.protocol import AgentConfig
from mxprobe.trace import open_trace

DEFAULT = AgentConfig()
SCHEDULES = {
    f"default (every {DEFAULT.every}, weights every {DEFAULT.weights_every})": (DEFAULT.every, DEFAULT.weights_every),
    f"demo (every {PROBE_EVERY}, weights every {PROBE_EVERY})": (PROBE_EVERY, PROBE_EVERY),
}
PERIOD = DEFAULT.weights_every
EVENTS = {"weights": 1, "probe": PERIOD // DEFAULT.every - 1, "sensitivity": PERIOD // DEFAULT.sensitivity_every}
"""What costs, and how often it comes in `PERIOD` steps."""
IDLE_NS = 1_000_000
WIDTH, NARROW, NARROW_TOKENS = 512, 64, 128
ROUND_STEPS = 200
T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t by degrees of freedom."""

# Writes for each step: its number, CPU seconds of the main thread, seconds. On SIGUSR1, 60 steps of other lengths.
TARGET = """
import os, signal, sys, time
import torch
from torch import nn
out, n_tokens, width, n_uneven = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, width // 64, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1024, width), nn.Linear(width, 1024)
        self.blocks = nn.Sequential(*[Block() for _ in range(6)])
    def forward(self, input_ids):
        return self.head(self.blocks(self.embed(input_ids)))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
def gradients(rows, length):
    ids = torch.randint(0, 1024, (rows, length))
    nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
def take_uneven_steps(n):
    for _ in range(n):
        gradients(int(torch.randint(1, 2 * n_tokens // 128 + 1, ())), int(torch.randint(8, 256, ())))
        optimizer.step()
        optimizer.zero_grad()
take_uneven_steps(n_uneven)
wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(60))
log, step = open(out, "w", buffering=1), 0
while True:
    while wanted:
        take_uneven_steps(wanted.pop())
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    gradients(n_tokens // 128, 128)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    log.write(f"{step} {time.thread_time() - cpu_s} {time.perf_counter() - wall_s}\\n")
"""


Steps = dict[int, tuple[float, float]]
"""Step -> (CPU seconds of the main thread, seconds)."""


class Target:
    """A model that trains until it is killed."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process = process
        self._out = out

    def steps(self) -> Steps:
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        complete = [line.split() for line in lines if line.count(" ") == 2]
        return {int(step): (float(cpu_s), float(wall_s)) for step, cpu_s, wall_s in complete}

    @contextmanager
    def going(self) -> Iterator[None]:
        """A stopped process is let go on, and stopped again."""
        self.process.send_signal(signal.SIGCONT)
        yield
        self.process.send_signal(signal.SIGSTOP)

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


Costs = dict[str, list[float]]
"""Event -> what each of its kind cost, in steps of the base."""


def busy_steps(overhead: pd.DataFrame) -> dict[int, int]:
    """Step -> the probed step that it is, or whose measuring it ran beside."""
    found: dict[int, int] = {}
    for step, row in overhead[overhead.measure_ns > IDLE_NS].iterrows():
        until = row.time_ns + row.measure_ns
        beside = overhead[(overhead.time_ns > row.time_ns) & (overhead.time_ns - overhead.step_ns < until)]
        found.update(dict.fromkeys([step, *beside.index], step))
    return found


def account(costs: Costs, overhead: pd.DataFrame, steps: Steps, base_s: float, replayed: set[int]) -> None:
    """Book the steps of one attach to the events that they were for."""
    busy = busy_steps(overhead)
    found: dict[int, float] = {}
    first = int(overhead.index[0])
    for step in map(int, overhead.index):
        if step in busy or step in replayed:
            event = busy.get(step, step)
            found[event] = found.get(event, 0.0) + steps[step][0] / base_s - 1
    for event, cost in found.items():
        costs["sensitivity" if event in replayed else "weights" if event == first else "probe"].append(cost)


def attached(target: Target, trace: Path, n_steps: int, options: Sequence[str]) -> pd.DataFrame:
    """Table `overhead` of one attach of so many steps, by step."""
    pid = str(target.process.pid)
    mxprobe("attach", pid, "-o", str(trace), "--background", *options)
    last = target.wait_for(n_steps + 1)
    mxprobe("detach", pid)
    return open_trace(trace).overhead().set_index("step").loc[:last].iloc[:n_steps]


def alone(target: Target, n_steps: int) -> range:
    """So many whole steps without mxprobe."""
    first = target.wait_for(1) + 1
    target.wait_for(n_steps + 1)
    return range(first, first + n_steps)


def base_of(steps: Steps, *stretches: range) -> float:
    """CPU seconds of a step without mxprobe."""
    return statistics.median(steps[step][0] for stretch in stretches for step in stretch)


def measure_pair(target: Target, directory: Path, window: int, costs: Costs) -> None:
    """Both attaches, with stretches without before, between and after."""
    before = alone(target, window)
    for name, options in (
        ("probes", ("--every", str(window), "--weights-every", str(PERIOD), "--sensitivity-every", "0")),
        ("replay", ("--every", str(100 * window), "--sensitivity-every", str(10 * window))),
    ):
        overhead = attached(target, directory / f"{name}.mxprobe", 2 * window, options)
        after = alone(target, window)
        steps = target.steps()
        replayed = {int(overhead.index[window])} if name == "replay" else set[int]()
        account(costs, overhead, steps, base_of(steps, before, after), replayed)
        before = after


def hooks_s(n_rounds: int) -> list[float]:
    """Of each round: CPU seconds that a step takes longer with hooks in, nothing measured in or beside it.

    The agent keeps its hooks in until the end of a first period in which nothing was generated: here, all the time.
    """
    found: list[float] = []
    options = ("--every", str(10 * ROUND_STEPS), "--sensitivity-every", "0")
    with running_model(NARROW_TOKENS, NARROW) as (target, directory):
        before = alone(target, ROUND_STEPS)
        for i in range(n_rounds):
            overhead = attached(target, directory / f"{i}.mxprobe", 2 * ROUND_STEPS, options)
            after = alone(target, ROUND_STEPS)
            steps, busy = target.steps(), busy_steps(overhead)
            idle = [steps[step][0] for step in map(int, overhead.index) if step not in busy]
            found.append(statistics.median(idle) - base_of(steps, before, after))
            before = after
    return found


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of their mean; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return T_975.get(len(values) - 1, 2.2) * statistics.stdev(values) / len(values) ** 0.5


def words(mean: float, half: float) -> str:
    return f"{mean:+.2%} ({mean - half:+.2%} to {mean + half:+.2%})" if math.isfinite(half) else f"{mean:+.2%}"


def interval(ratios: Sequence[float]) -> str:
    """Mean of ratios less one, and its 95 % interval."""
    return words(statistics.mean(ratios), half_width(ratios))


def measure_model(pairs: int, rounds: int, window: int, n_tokens: int) -> None:
    before = os.getloadavg()[0]
    hooks = hooks_s(rounds)
    print(f"hooks: {statistics.mean(hooks) * 1e3:.3f} +- {half_width(hooks) * 1e3:.3f} ms a step", flush=True)
    costs: Costs = {name: [] for name in EVENTS}
    with running_model(n_tokens, WIDTH) as (target, directory):
        for i in range(pairs):
            measure_pair(target, directory / str(i), window, costs)
            print(f"pair {i + 1} of {pairs}: {costs}", file=sys.stderr, flush=True)
        seconds = statistics.median(wall_s for _, wall_s in target.steps().values())
        cpu_s = statistics.median(cpu_s for cpu_s, _ in target.steps().values())
    if not all(costs.values()):
        raise SystemExit(f"not each event was measured before the next: a longer --window ({costs})")
    by_itself = [each / cpu_s for each in hooks]
    shares = {name: [cost / PERIOD for cost in found] for name, found in costs.items()}
    mean = statistics.mean(by_itself) + sum(n * statistics.mean(shares[name]) for name, n in EVENTS.items())
    half = math.hypot(half_width(by_itself), *(n * half_width(shares[name]) for name, n in EVENTS.items()))
    load = f"load average {before:.1f} to {os.getloadavg()[0]:.1f}"
    print(f"{pairs} pairs, {rounds} rounds, steps of {seconds:.2f} s; {load}\n")
    print("| | main-thread CPU time, 95 % interval |")
    print("|---|---|")
    print(f"| default schedule | {words(mean, half)} |")
    print(f"| attached, hooks in, nothing measured | {interval(by_itself)} |")
    for name, n in EVENTS.items():
        each = statistics.mean(costs[name])
        print(f"| {n} x {name} in {PERIOD} steps, {each:.2f} steps each | {interval([n * x for x in shares[name]])} |")


def measure_whole(pairs: int, period: int, n_tokens: int) -> None:
    """The default schedule as it is; of another `period` than 200 the schedule is that much denser."""
    scaled = {
        "--every": DEFAULT.every * period // PERIOD,
        "--weights-every": DEFAULT.weights_every * period // PERIOD,
        "--sensitivity-every": DEFAULT.sensitivity_every * period // PERIOD,
    }
    schedule = [] if period == PERIOD else [text for name, n in scaled.items() for text in (name, str(max(n, 1)))]
    print("| pair | CPU time | wall time | in hooks, by the trace | probes | replays | load average |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ratios: list[tuple[float, float]] = []
    with running_model(n_tokens, WIDTH) as (target, directory):
        for i in range(pairs):
            trace = directory / f"{i}.mxprobe"
            before = alone(target, max(period // 4, 2))
            mxprobe("attach", str(target.process.pid), "-o", str(trace), "--background", *schedule)
            last = target.wait_for(period + 1)
            mxprobe("detach", str(target.process.pid))
            after = alone(target, max(period // 4, 2))
            opened, steps = open_trace(trace), target.steps()
            seen = opened.overhead().set_index("step").loc[:last].iloc[:period]
            base = [*before, *after]
            cpu, wall = (
                statistics.mean(steps[step][k] for step in map(int, seen.index))
                / statistics.mean(steps[step][k] for step in base)
                - 1
                for k in (0, 1)
            )
            ratios.append((cpu, wall))
            hooks = float(seen.probe_ns.sum() / (seen.step_ns.sum() - seen.probe_ns.sum()))
            replays = opened.sensitivity()["step"].nunique()
            print(
                f"| {i + 1}, {len(seen)} steps | {cpu:+.2%} | {wall:+.2%} | {hooks:.2%} | {int(seen.probed.sum())} "
                f"| {replays} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    cpu, wall = zip(*ratios, strict=True)
    print(f"| mean, 95 % interval | {interval(cpu)} | {interval(wall)} | | | | |")


@contextmanager
def running_model(
    n_tokens: int, width: int, *, n_uneven: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Target, Path]]:
    """The model, training, and a directory for its traces; `n_uneven` steps of other lengths come first."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "steps")
        command = [sys.executable, "-c", TARGET, str(out), str(n_tokens), str(width), str(n_uneven)]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})
        try:
            target = Target(process, out)
            target.wait_for(3)
            yield target, Path(name)
        finally:
            process.kill()
            process.wait()


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
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--window", type=int, default=12, help="steps between two events, and of each stretch without")
    parser.add_argument("--rounds", type=int, default=20, help="short attaches to the narrow model")
    parser.add_argument("--steps", type=int, default=250, help="of the demo's job")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, which sets its length")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--period", type=int, default=PERIOD, help="steps of --whole")
    options = parser.parse_args()
    if options.whole:
        measure_whole(options.pairs, options.period, options.tokens)
    elif options.demo:
        measure_demo(options.pairs, options.steps)
    else:
        measure_model(options.pairs, options.rounds, options.window, options.tokens)


if __name__ == "__main__":
    main()
