"""A real job, attached and detached, against the same job left alone: bits, leftovers, time, memory."""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxprobe.attach.host_checks import HostCheck
from mxprobe.demo.runner import running
from mxprobe.errors import MxprobeError
from mxprobe.trace import open_trace

JOB = Path(__file__).with_name("training_job.py")
EVERY = 10
"""A denser schedule than a user's, so that a minute holds enough probed steps."""
STEPS_BEFORE, STEPS_ATTACHED, STEPS_ALONE = 5, 20, 20
N_ATTACHES = 4
"""Attaches by the first way in, whose cost is measured; by each other way once."""
T_975 = 3.182
"""Student's t, 3 degrees of freedom: the interval over `N_ATTACHES` ratios."""
STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Step:
    loss: str
    digest: str
    cpu_s: float
    wall_s: float
    peak: int


@dataclass(frozen=True)
class AttachedRun:
    """Holds what the job wrote, and when it was attached."""

    steps: list[Step]
    spans: list[tuple[int, int, int]]
    """For each attach: the first step that began after it was acknowledged, the one at which it was asked to leave, and
    the first that began after it had left."""
    traces: list[Path]

    @property
    def n_attached(self) -> int:
        return sum(last - first for first, last, _ in self.spans)


def check_attach(ways: Sequence[str], directory: Path) -> list[HostCheck]:
    """Return findings for each way in; the control is run once, for as many steps as the longest of them."""
    attaches = [N_ATTACHES, *(1 for _ in ways[1:])]
    runs = {way: run_attached(way, directory / way, n) for way, n in zip(ways, attaches, strict=True)}
    n_steps = max(len(run.steps) for run in runs.values())
    alone = run_alone(n_steps, directory / "alone")
    found: list[HostCheck] = []
    for way, run in runs.items():
        found += [compare_bits(way, run, alone), _recorded(way, run)]
    found += [cost(runs[ways[0]]), *_memory(runs[ways[0]], alone)]
    return found


def run_attached(way: str, directory: Path, n_attaches: int) -> AttachedRun:
    """Attach to the job by one way in, let it train, detach, let it train on; so many times.

    Raises:
        MxprobeError: an attach was refused, or the job ended.
    """
    prefix = ["-m", "mxprobe", "run", "--", sys.executable] if way == "listener" else []
    schedule = ["--every", str(EVERY), "--weights-every", str(EVERY), "--sensitivity-every", "0"]
    spans: list[tuple[int, int, int]] = []
    traces = [directory / f"{i}.mxprobe" for i in range(n_attaches)]
    with _job(directory, prefix) as job:
        job.wait_for(STEPS_BEFORE)
        pid = str(job.process.pid)
        for trace in traces:
            _mxprobe("attach", pid, "-o", str(trace), "--via", way, "--background", *schedule)
            first = len(job.steps()) + 1
            job.wait_for(first + STEPS_ATTACHED)
            last = len(job.steps())
            _mxprobe("detach", pid)
            spans.append((first, last, len(job.steps()) + 1))
            job.wait_for(spans[-1][2] + STEPS_ALONE)
        return AttachedRun(job.finish(), spans, traces)


def run_alone(n_steps: int, directory: Path) -> list[Step]:
    with _job(directory, []) as job:
        job.wait_for(n_steps)
        return job.finish()


class _Job:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, stop: Path, errors: Path) -> None:
        self.process = process
        self._log, self._stop, self._errors = log, stop, errors

    def steps(self) -> list[Step]:
        lines = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        return [_step(json.loads(line)) for line in lines]

    def wait_for(self, n_steps: int) -> None:
        """Wait until the job has taken so many steps in all."""
        seen, since = 0, time.monotonic()
        while seen < n_steps:
            time.sleep(0.05)
            now = len(self.steps())
            if now > seen:
                seen, since = now, time.monotonic()
            if self.process.poll() is not None or time.monotonic() - since > STEP_TIMEOUT_S:
                raise MxprobeError(
                    f"the selftest's own training job stopped after {seen} steps",
                    cause=self._errors.read_text()[-500:] or "no output",
                    remedy="run it by hand: python -m mxprobe.selftest.training_job LOG STOP",
                )

    def finish(self) -> list[Step]:
        self._stop.touch()
        self.process.wait(STEP_TIMEOUT_S)
        return self.steps()


@contextmanager
def _job(directory: Path, prefix: Sequence[str]) -> Generator[_Job]:
    directory.mkdir(parents=True, exist_ok=True)
    log, stop, errors = directory / "steps.jsonl", directory / "stop", directory / "output.txt"
    command = [sys.executable, *prefix, str(JOB), str(log), str(stop)]
    with running(command, errors) as process:
        yield _Job(process, log, stop, errors)


def _step(line: dict[str, Any]) -> Step:
    cpu_s, wall_s = line["times"]
    return Step(line["loss"], line["digest"], cpu_s, wall_s, line["peak"])


def _mxprobe(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "mxprobe", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise MxprobeError(f"mxprobe {arguments[0]} failed: {done.stderr.strip()}")


def compare_bits(way: str, run: AttachedRun, alone: list[Step]) -> HostCheck:
    """Compare loss, parameters and random state of each step with the control's.

    A difference before the attach is none of ours, and leaves the question open.
    """
    n = min(len(run.steps), len(alone))
    states = ([(step.loss, step.digest) for step in steps[:n]] for steps in (run.steps, alone))
    parted = next((i for i, (ours, theirs) in enumerate(zip(*states, strict=True)) if ours != theirs), n)
    name = f"bits, {way}"
    if parted == n:
        attached = f"{run.n_attached} of them attached ({len(run.spans)} x in and out)"
        detail = f"loss, parameters and random state of {n} steps, {attached}: identical"
        return HostCheck(name, True, detail)
    before = parted < run.spans[0][0]
    where = "before the attach: this machine does not repeat a run" if before else "after the attach"
    return HostCheck(name, None if before else False, f"step {parted + 1} differs, {where}")


def _recorded(way: str, run: AttachedRun) -> HostCheck:
    traces = [open_trace(path) for path in run.traces]
    operands = [trace.tensors() for trace in traces]
    swallowed = sum(int(trace.overhead()["n_errors"].max()) for trace in traces if len(trace.overhead()))
    latency_ms = max(trace.run.get("attach_latency_ms", math.nan) for trace in traces)
    pauses_ms = [trace.run["pause_ms"] for trace in traces if trace.run.get("pause_ms") is not None]
    parts = [
        f"{sum(map(len, operands))} operands of {operands[0]['module'].nunique()} modules",
        f"in after {latency_ms / 1e3:.2f} s at most",
        f"main thread stopped {max(pauses_ms):.1f} ms at most" if pauses_ms else "nothing stopped",
        f"{swallowed} exceptions swallowed",
    ]
    whole = all(trace.is_complete and len(rows) for trace, rows in zip(traces, operands, strict=True))
    return HostCheck(f"trace, {way}", whole and not swallowed, ", ".join(parts))


def cost(run: AttachedRun) -> HostCheck:
    """Compare the CPU time of the training thread with that of the steps of the same job right after the detach.

    Another process, or another minute, would be a comparison of two moods of the machine. What is still measured
    between the request to leave and the leaving is the cost of the steps before it.
    """
    ratios: list[float] = []
    for first, last, gone in run.spans:
        usual_s = statistics.mean(step.cpu_s for step in run.steps[gone : gone + STEPS_ALONE])
        extra_s = sum(step.cpu_s - usual_s for step in run.steps[first:gone])
        ratios.append(1 + extra_s / (last - first) / usual_s)
    mean, half = statistics.mean(ratios), T_975 * statistics.stdev(ratios) / len(ratios) ** 0.5
    wall_s = statistics.median(step.wall_s for step in run.steps)
    return HostCheck(
        "cost",
        None,
        f"training thread {mean - 1:+.1%} CPU (95 %: {mean - half - 1:+.1%} to {mean + half - 1:+.1%}) with every "
        f"{EVERY}th step probed, steps of {wall_s * 1e3:.0f} ms; longer steps and the default schedule cost less",
    )


def _memory(run: AttachedRun, alone: list[Step]) -> list[HostCheck]:
    if not torch.cuda.is_available():
        return []
    extra = (run.steps[-1].peak - alone[-1].peak) / 2**20
    return [HostCheck("GPU memory", None, f"peak {extra:+.0f} MiB against the job alone")]


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mxprobe-selftest-", ignore_cleanup_errors=True)
