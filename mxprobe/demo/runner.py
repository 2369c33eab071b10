"""Runs the demo as a user would: start the job, attach to its PID from outside, detach, read what was recorded.

Nothing here knows what the scenario should show: the verdict comes from the trace alone.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mxprobe.errors import MxprobeError, UsageError

from .second_run import Replay

STEPS = 250
PROBE_EVERY = 10
DETACH_AT = 245
"""The last steps run unattached, so that the demo shows the run going on without us."""

_STALL_S = 180.0
_POLL_S = 0.1


class Scenario(StrEnum):
    OUTLIERS = "outliers"
    HEALTHY = "healthy"
    STALE = "stale"


JOB_OPTIONS: dict[Scenario, tuple[str, ...]] = {
    Scenario.OUTLIERS: ("--outliers", "32", "--rollout", "mxfp4"),
    Scenario.HEALTHY: ("--train", "mxfp4", "--rollout", "mxfp4"),
    Scenario.STALE: ("--outliers", "32", "--rollout", "stale"),
}
WHAT_RUNS: dict[Scenario, str] = {
    Scenario.OUTLIERS: "MXFP4 rollout, high-precision trainer, one outlier channel per block",
    Scenario.HEALTHY: "trainer and rollout alike in MXFP4",
    Scenario.STALE: "as outliers, but the rollout's weights stay at their first value",
}


@dataclass(frozen=True)
class Step:
    """One line of the job's own log: `step` counts from 1; reward in [0, 1]; entropy in nats."""

    step: int
    reward: float
    entropy: float


class DemoPaths:
    """The files of a demo, below its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job = directory / "job"
        self.parameters = self.job / "parameters.pt"
        """The job's last weights."""
        self.job_log = directory / "job.log"
        self.attach_log = directory / "attach.log"
        self.trace = directory / "trace.mxprobe"
        self.report = directory / "report.html"
        self.correction = directory / "correction.py"
        """The snippet that the verdict came with, as the second run applies it."""

    @property
    def second(self) -> DemoPaths:
        """The files of the second run, to which the correction is applied."""
        return DemoPaths(self.directory / "corrected")


def require_trl() -> None:
    """Raise UsageError when the training library of the demo is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise UsageError(
            "the demo trains with TRL, which is not installed",
            cause="mxprobe itself does not need it, so it is an extra",
            remedy='pip install "mxprobe[trl]"',
        )


def job_command(
    scenario: Scenario, *, seed: int, out: Path, steps: int = STEPS, apply: Path | None = None
) -> list[str]:
    """Return the command line of the training job: a plain script that imports nothing of mxprobe.

    `apply` is a Python file whose `enable(model)` the job calls, e.g. the snippet of a recommendation.
    """
    script = Path(__file__).with_name("job.py")
    return [
        sys.executable,
        str(script),
        *("--out", str(out), "--steps", str(steps), "--seed", str(seed)),
        *JOB_OPTIONS[scenario],
        *(("--apply", str(apply)) if apply else ()),
    ]


def replay(scenario: Scenario, paths: DemoPaths, *, seed: int, correction: Path) -> Replay:
    """Measure KL of rollout and trainer on the finished job's last weights, without the correction and with it.

    In a process of its own, a few seconds. Raises MxprobeError, with the end of what it printed, when it fails.
    """
    script = Path(__file__).with_name("replay_kl.py")
    options = ["--parameters", str(paths.parameters), "--apply", str(correction)]
    of_job = ["--out", str(paths.job), "--seed", str(seed), *JOB_OPTIONS[scenario]]
    done = subprocess.run([sys.executable, str(script), *options, *of_job], capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise MxprobeError("replaying the finished demo job failed", cause=tail)
    found = json.loads(done.stdout.splitlines()[-1])
    return Replay(tuple(found["plain"]), tuple(found["corrected"]))


def read_steps(metrics_file: Path) -> list[Step]:
    """Read the steps logged so far; a line still being written is left for the next call."""
    try:
        text = metrics_file.read_text()
    except FileNotFoundError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()
    records = [json.loads(line) for line in lines]
    return [Step(record["step"], record["reward"], record["entropy"]) for record in records]


@contextmanager
def running(command: list[str], log: Path) -> Generator[subprocess.Popen[bytes]]:
    """Run a child process that never outlives the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def record(
    scenario: Scenario,
    paths: DemoPaths,
    *,
    seed: int,
    apply: Path | None = None,
    on_attached: Callable[[int], None],
    on_step: Callable[[Step], None],
) -> None:
    """Start the job, attach by PID while it trains, detach before it ends, wait for it to finish.

    Leaves the job's files, both logs and the trace under `paths`. `on_attached` gets the PID, `on_step` each new
    step of the job. Raises MxprobeError, with the end of the log that explains it, when job or attach fail.
    """
    command = job_command(scenario, seed=seed, out=paths.job, apply=apply)
    with running(command, paths.job_log) as job:
        _follow(paths, job, until_step=1, on_step=on_step)
        attach = [sys.executable, "-m", "mxprobe", "attach", str(job.pid), "-o", str(paths.trace)]
        schedule = ["--every", str(PROBE_EVERY), "--weights-every", str(PROBE_EVERY)]
        with running([*attach, *schedule], paths.attach_log) as controller:
            on_attached(job.pid)
            _follow(paths, job, until_step=DETACH_AT, on_step=on_step, beside=controller)
            detach = subprocess.run(
                [sys.executable, "-m", "mxprobe", "detach", str(job.pid)], capture_output=True, text=True, check=False
            )
            if detach.returncode or controller.wait(60):
                raise _failure("detaching from the demo job failed", paths.attach_log, detach.stderr)
        if job.wait():
            raise _failure("the demo job failed after detach", paths.job_log)


def _follow(
    paths: DemoPaths,
    job: subprocess.Popen[bytes],
    *,
    until_step: int,
    on_step: Callable[[Step], None],
    beside: subprocess.Popen[bytes] | None = None,
) -> None:
    """Report steps as they are logged, until `until_step`."""
    metrics, log = paths.job / "metrics.jsonl", paths.job_log
    seen = len(read_steps(metrics)) if beside is not None else 0
    deadline = time.monotonic() + _STALL_S
    while seen < until_step:
        if job.poll() is not None:
            raise _failure(f"the demo job ended early (exit code {job.returncode})", log)
        if beside is not None and beside.poll() not in (None, 0):
            raise _failure(f"attaching failed (exit code {beside.returncode})", paths.attach_log)
        steps = read_steps(metrics)
        for step in steps[seen:]:
            on_step(step)
        if len(steps) > seen:
            seen, deadline = len(steps), time.monotonic() + _STALL_S
        elif time.monotonic() > deadline:
            raise _failure(f"the demo job logged no step for {_STALL_S:.0f} s", log)
        time.sleep(_POLL_S)


def _failure(what: str, log: Path, more: str = "") -> MxprobeError:
    tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
    return MxprobeError(what, cause="\n".join(part for part in (tail, more.strip()) if part), remedy=f"see {log}")
