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

from mxprobe.attach.surroundings import Finding
from mxprobe.errors import MxprobeError
from mxprobe.trace import open_trace

JOB = Path(__file__).with_name("job.py")
EVERY = 10
"""A denser schedule than a user's, so that a minute holds enough probed steps."""
STEPS_BEFORE, STEPS_ATTACHED, STEPS_AFTER = 5, 60, 10
STEP_TIMEOUT_S = 60.0
N_GROUPS = 10
T_975_9 = 2.262
"""Student's t, 9 degrees of freedom: the interval over `N_GROUPS` means."""


@dataclass(frozen=True)
class Step:
    loss: str
    digest: str
    cpu_s: float
    wall_s: float
    peak: int


@dataclass(frozen=True)
class AttachedRun:
    """What the job wrote, and when it was attached."""

    steps: list[Step]
    first: int
    """Index of the first step that began after the attach had been acknowledged."""
    last: int
    trace: Path


def check_attach(ways: Sequence[str], directory: Path) -> list[Finding]:
    """Findings for each way in; the control is run once, for as many steps as the longest of them."""
    runs = {way: run_attached(way, directory / way) for way in ways}
    n_steps = max(len(run.steps) for run in runs.values())
    alone = run_alone(n_steps, directory / "alone")
    found: list[Finding] = []
    for way, run in runs.items():
        found += [compare_bits(way, run, alone), _recorded(way, run)]
    found += [cost(runs[ways[0]], alone), *_memory(runs[ways[0]], alone)]
    return found


def run_attached(way: str, directory: Path) -> AttachedRun:
    """Attach to the job by one way in, let it train, detach, let it train on.

    Raises:
        MxprobeError: the attach was refused, or the job ended.
    """
    prefix = ["-m", "mxprobe", "run", "--", sys.executable] if way == "listener" else []
    trace = directory / "trace.mxprobe"
    with _job(directory, prefix) as job:
        job.wait_for(STEPS_BEFORE)
        pid = str(job.process.pid)
        schedule = ["--every", str(EVERY), "--weights-every", str(EVERY), "--sensitivity-every", "0"]
        _mxprobe("attach", pid, "-o", str(trace), "--via", way, "--background", *schedule)
        first = len(job.steps())
        job.wait_for(first + STEPS_ATTACHED)
        _mxprobe("detach", pid)
        last = len(job.steps())
        job.wait_for(last + STEPS_AFTER)
        return AttachedRun(job.finish(), first, last, trace)


def run_alone(n_steps: int, directory: Path) -> list[Step]:
    with _job(directory, []) as job:
        job.wait_for(n_steps)
        return job.finish()


class _Job:
    def __init__(self, process: subprocess.Popen[str], log: Path, stop: Path, errors: Path) -> None:
        self.process = process
        self._log, self._stop, self._errors = log, stop, errors

    def steps(self) -> list[Step]:
        lines = self._log.read_text().split("\n")[:-1] if self._log.exists() else []
        return [_step(json.loads(line)) for line in lines]

    def wait_for(self, n_steps: int) -> None:
        """Until the job has taken so many steps in all."""
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
                    remedy="run it by hand: python -m mxprobe.selftest.job LOG STOP",
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
    with open(errors, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True)
    try:
        yield _Job(process, log, stop, errors)
    finally:
        process.kill()
        process.wait()


def _step(line: dict[str, Any]) -> Step:
    cpu_s, wall_s = line["times"]
    return Step(line["loss"], line["digest"], cpu_s, wall_s, line["peak"])


def _mxprobe(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "mxprobe", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise MxprobeError(f"mxprobe {arguments[0]} failed: {done.stderr.strip()}")


def compare_bits(way: str, run: AttachedRun, alone: list[Step]) -> Finding:
    """Loss, parameters and random state of each step against the control's; a difference before the attach is none
    of ours, and leaves the question open."""
    n = min(len(run.steps), len(alone))
    states = ([(step.loss, step.digest) for step in steps[:n]] for steps in (run.steps, alone))
    parted = next((i for i, (ours, theirs) in enumerate(zip(*states, strict=True)) if ours != theirs), n)
    name = f"bits, {way}"
    if parted == n:
        detail = f"loss, parameters and random state of {n} steps, {run.last - run.first} of them attached: identical"
        return Finding(name, True, detail)
    where = "before the attach: this machine does not repeat a run" if parted < run.first else "after the attach"
    return Finding(name, None if parted < run.first else False, f"step {parted + 1} differs, {where}")


def _recorded(way: str, run: AttachedRun) -> Finding:
    trace = open_trace(run.trace)
    facts, overhead = trace.run, trace.overhead()
    swallowed = int(overhead["n_errors"].max()) if len(overhead) else 0
    operands = trace.tensors()
    parts = [
        f"{len(operands)} operands of {operands['module'].nunique()} modules",
        f"in after {facts.get('attach_latency_ms', math.nan) / 1e3:.2f} s",
        f"main thread stopped {facts['pause_ms']:.1f} ms" if facts.get("pause_ms") is not None else "nothing stopped",
        f"{swallowed} exceptions swallowed",
    ]
    return Finding(f"trace, {way}", trace.is_complete and len(operands) > 0 and not swallowed, ", ".join(parts))


def cost(run: AttachedRun, alone: list[Step]) -> Finding:
    """CPU time of the training thread against the same steps of the control; interval over groups of steps."""
    steps = range(run.first, min(run.last, len(alone)))
    size = len(steps) // N_GROUPS
    ratios = [
        sum(run.steps[i].cpu_s for i in group) / sum(alone[i].cpu_s for i in group)
        for group in (steps[k * size : (k + 1) * size] for k in range(N_GROUPS))
    ]
    mean, half = statistics.mean(ratios), T_975_9 * statistics.stdev(ratios) / N_GROUPS**0.5
    usual = statistics.median(step.wall_s for step in alone)
    return Finding(
        "cost",
        None,
        f"training thread {mean - 1:+.1%} CPU (95 %: {mean - half - 1:+.1%} to {mean + half - 1:+.1%}) with every "
        f"{EVERY}th step probed, steps of {usual * 1e3:.0f} ms; longer steps and the default schedule cost less",
    )


def _memory(run: AttachedRun, alone: list[Step]) -> list[Finding]:
    if not torch.cuda.is_available():
        return []
    extra = (run.steps[-1].peak - alone[-1].peak) / 2**20
    return [Finding("GPU memory", None, f"peak {extra:+.0f} MiB against the job alone")]


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mxprobe-selftest-", ignore_cleanup_errors=True)
