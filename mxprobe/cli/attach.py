"""`mxprobe attach PID`: record a trace of a running training process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.durations import Duration
from mxprobe.errors import AttachError
from mxprobe.protocol import AgentConfig
from mxprobe_kernels.formats import Rule

if TYPE_CHECKING:
    from mxprobe.attach.controller import AttachOptions
    from mxprobe.attach.process import Process

_DEFAULTS = AgentConfig()
_RETRY_EVERY_S = 1.0
_WORTH_WAITING_FOR = ("no_torch", "not_ready")

_ENDED = {
    "detached": "detached",
    "interrupted": "detached",
    "duration": "detached after the time asked for",
    "target_exited": "the process has ended",
    "agent_lost": "the agent went away; the process runs on",
    "error_budget": "the agent took itself off after too many errors; see the events in the trace",
    "lease_expired": "the agent took itself off: it heard nothing from this process for too long",
    "exit": "the process has ended",
}


@click.command("attach")
@click.argument("pid", type=click.IntRange(min=1))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Trace directory; default ./NAME-PID-TIME.mxprobe."
)
@click.option(
    "--every", type=click.IntRange(min=1), default=_DEFAULTS.every, show_default=True, help="Probe every N-th step."
)
@click.option(
    "--weights-every",
    type=click.IntRange(min=1),
    default=_DEFAULTS.weights_every,
    show_default=True,
    help="Decompose the weights every N-th step.",
)
@click.option("--layers", multiple=True, metavar="GLOB", help="Only modules whose name matches; may be repeated.")
@click.option(
    "--rule",
    type=click.Choice([rule.value for rule in Rule]),
    default=_DEFAULTS.rule,
    show_default=True,
    help="Scale rule of the MXFP4 quantizer that errors are measured for.",
)
@click.option("--duration", type=Duration(), help="Detach after so long, e.g. 10m.")
@click.option(
    "--step-timeout",
    type=Duration(),
    default=_DEFAULTS.step_timeout_s,
    show_default=True,
    help="Give up if the process takes no step for so long.",
)
@click.option("--wait", type=Duration(), help="Keep trying for so long while the process has not yet imported torch.")
@click.option("--background", is_flag=True, help="Return once attached; detach with `mxprobe detach PID`.")
def command(
    pid: int,
    output: Path | None,
    every: int,
    weights_every: int,
    layers: tuple[str, ...],
    rule: str,
    duration: float | None,
    step_timeout: float,
    wait: float | None,
    background: bool,
) -> None:
    """Attach to process PID and record a trace until it is detached.

    The training goes on bit for bit as without it. Ctrl-C detaches, closes the trace and prints its directory.
    """
    from mxprobe.attach.entry import check_reachable
    from mxprobe.attach.process import look_up

    process = look_up(pid)
    check_reachable(process)
    directory = output or Path(f"{process.name}-{pid}-{datetime.now():%Y%m%d-%H%M%S}.mxprobe")
    config = AgentConfig(
        every=every,
        weights_every=weights_every,
        layers=layers or _DEFAULTS.layers,
        rule=rule,
        step_timeout_s=step_timeout,
    )

    def job(ready: Callable[[], None]) -> None:
        from mxprobe.attach.controller import AttachOptions

        options = AttachOptions(directory, config, duration_s=duration, command_line=["mxprobe", *sys.argv[1:]])
        _record(process, options, wait_s=wait or 0.0, ready=ready)

    if not background:
        job(lambda: None)
        click.echo(directory)
        return
    from mxprobe.attach.background import LOG_NAME, run_in_background

    controller_pid = run_in_background(job, directory / LOG_NAME)
    click.echo(f"attached to {pid}; process {controller_pid} records it (log: {directory / LOG_NAME})", err=True)
    click.echo(directory)


def _record(process: Process, options: AttachOptions, *, wait_s: float, ready: Callable[[], None]) -> None:
    from mxprobe.attach.controller import Controller
    from mxprobe.attach.progress import Progress

    progress = Progress()
    deadline = time.monotonic() + wait_s
    while True:
        try:
            outcome = Controller(process, options, progress, on_attached=ready).run()
            break
        except AttachError as error:
            if error.reason not in _WORTH_WAITING_FOR or time.monotonic() > deadline:
                raise
        progress.show(f"waiting for process {process.pid} to import torch")
        time.sleep(_RETRY_EVERY_S)
    ended = _ENDED.get(outcome.reason, outcome.reason)
    steps = "" if outcome.steps is None else f" after {outcome.steps} steps"
    progress.say(f"{ended}{steps}; {outcome.n_rows} rows in {outcome.directory}")
