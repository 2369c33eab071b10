"""`mxprobe attach PID...`: record a trace of running training processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mxprobe.attach import MECHANISMS
from mxprobe.cli import targets
from mxprobe.cli.param_types import Duration, Experts, Kept, Share, Size
from mxprobe.errors import UsageError
from mxprobe.protocol import AgentConfig
from mxprobe_kernels.formats import Rule

if TYPE_CHECKING:
    from mxprobe.attach.daemon import Attach
    from mxprobe.attach.group import AttachOptions

_DEFAULTS = AgentConfig()
DEFAULT_MAX_OVERHEAD = 0.03
DEFAULT_MAX_TRACE = "2GB"
_RULES = [rule.value for rule in Rule]
_MAX_TORCH_WAIT_S = 60.0  # of one try: meanwhile the agent listens to nobody


def _setting(flag: str, kind: click.ParamType, help: str, field: str = "") -> Callable[[Any], Any]:
    """Return an option for the field of `AgentConfig` that is called like it, with that field's default."""
    default = getattr(_DEFAULTS, field or flag[2:].replace("-", "_"))
    return click.option(flag, type=kind, default=default, show_default=True, help=help)


@click.command("attach")
@targets.argument
@click.option(
    "--job",
    is_flag=True,
    help="Every rank, on this machine, of the torchrun or accelerate job of PID, and its driver's metrics.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Every actor of a Ray cluster that trains or logs, e.g. `auto`; on other nodes by a task there.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Trace directory; default ./NAME-PID-TIME.mxprobe. Of a URL (s3://BUCKET/NAME.mxprobe), ./NAME.mxprobe, "
    "which is copied there as it grows.",
)
@_setting("--every", click.IntRange(min=1), "Probe every N-th step.")
@_setting("--weights-every", click.IntRange(min=1), "Decompose the weights every N-th step.")
@_setting(
    "--sensitivity-every",
    click.IntRange(min=0),
    "Replay a microbatch every N-th step to see which operands matter; 0: never.",
)
@_setting(
    "--replay-every",
    click.IntRange(min=0),
    "Replay a microbatch every N-th step under other roundings; 0: never.",
)
@click.option("--layers", multiple=True, metavar="GLOB", help="Only modules whose name matches; may be repeated.")
@_setting(
    "--experts",
    Experts(),
    "Of fused experts, keep so many of the worst of each layer by name; `all` also measures all at each probed step.",
)
@_setting(
    "--rule",
    click.Choice(_RULES),
    "Scale rule of the MXFP4 quantizer that errors are measured for.",
)
@click.option(
    "--max-overhead",
    type=Share(),
    help="Share of the step time that the probe may cost; it thins itself to stay below. 0: no limit. "
    "Default: 3%, and no limit where --every is given.",
)
@click.option(
    "--max-gpu-memory",
    type=Size(),
    default=_DEFAULTS.max_gpu_memory,
    show_default="256MiB",
    help="GPU memory that copies and measuring them, or a replay, may take at once; fewer modules are then measured at "
    "a time, and replays that need more are skipped. 0: no limit.",
)
@click.option(
    "--eager-probe-steps",
    is_flag=True,
    help="Run probed steps of a torch.compile'd model eagerly, so that its modules are seen. Not bit for bit.",
)
@click.option("--record", is_flag=True, help="Flight recorder: norms at every step, written when something goes wrong.")
@click.option(
    "--keep",
    type=Kept(),
    metavar="STEPS|TIME",
    help="Keep so many steps, or so long (24h), at full resolution; older ones are added up. Default: what --max-trace "
    "has room for.",
)
@click.option(
    "--max-trace",
    type=Size(),
    default=DEFAULT_MAX_TRACE,
    show_default=True,
    help="Disk that the trace may take: beyond it old steps are added up, the oldest most. 0: no limit.",
)
@click.option("--duration", type=Duration(), help="Detach after so long, e.g. 10m.")
@_setting("--step-timeout", Duration(), "Give up if the process takes no step for so long.", field="step_timeout_s")
@click.option("--via", type=click.Choice(MECHANISMS), help="Use this way in and no other; default: the first open.")
@click.option("--wait", type=Duration(), help="Keep trying for so long while the process has not yet imported torch.")
@click.option("--background", is_flag=True, help="Return once attached; detach with `mxprobe detach PID`.")
@click.pass_context
def command(
    ctx: click.Context,
    pids: tuple[int, ...],
    job: bool,
    ray: str | None,
    output: Path | None,
    layers: tuple[str, ...],
    max_overhead: float | None,
    keep: tuple[int | None, float | None] | None,
    max_trace: int,
    duration: float | None,
    step_timeout: float,
    via: str | None,
    wait: float | None,
    background: bool,
    **agent: Any,
) -> None:
    """Attach to process PID and record a trace until it is detached; several go side by side into one trace.

    The training goes on bit for bit as without it, but under --eager-probe-steps. Ctrl-C detaches, closes the trace
    and prints its directory.
    A rank that cannot be attached is reported and left out; the exit code is 4 if none could be. A process that
    logs and runs no model is attached for its metrics alone.
    """
    from mxprobe.attach.entry import check_reachable

    found = _targets(pids, job=job, ray=ray, wait_s=wait or 0.0)
    # Not before it is known that there is a process: this brings pyarrow.
    from mxprobe.trace.object_store import check_reachable as check_store
    from mxprobe.trace.object_store import name_of, url_of

    if found.nodes:
        if output is not None and url_of(output) is not None:
            raise UsageError(
                "the shares of several nodes come together in a directory here",
                cause="-o names an object store",
                remedy="name a directory, and copy it afterwards with `mxprobe export TRACE --upload URL`",
            )
        directory = output or Path(f"ray-{datetime.now():%Y%m%d-%H%M%S}.mxprobe")
        _attach_nodes(found, directory, background=background)
        return
    processes = list(found.processes.values())
    if len(processes) == 1:
        check_reachable(processes[0], via=via)
    lead = pids[0] if pids else processes[0].pid
    copy_to = None if output is None else url_of(output)
    if copy_to is not None:
        check_store(copy_to)
        output = Path(name_of(copy_to))
    directory = output or Path(f"{processes[0].name}-{lead}-{datetime.now():%Y%m%d-%H%M%S}.mxprobe")
    config = AgentConfig(
        **agent,
        layers=layers or _DEFAULTS.layers,
        max_overhead=_limit(ctx) if max_overhead is None else max_overhead,
        torch_wait_s=min(max(wait or 0.0, _DEFAULTS.torch_wait_s), _MAX_TORCH_WAIT_S),
        step_timeout_s=step_timeout,
    )

    def attach(ready: Callable[[], None]) -> None:
        from mxprobe.attach.group import AttachOptions
        from mxprobe.trace import Retention

        options = AttachOptions(
            directory,
            config,
            duration_s=duration,
            copy_to=copy_to,
            retention=Retention(*(keep or (None, None)), max_trace or None),
            wait_s=wait or 0.0,
            via=via,
            command_line=["mxprobe", *sys.argv[1:]],
            job=found.job,
            perhaps=found.perhaps,
            beside=found.beside,
        )
        _record(found, options, ready=ready)

    attached = " ".join(map(str, found.pids))
    _run(attach, directory, background, lambda pid: f"attached to {attached}; process {pid} records")


def _run(attach: Attach, directory: Path, background: bool, words: Callable[[int], str]) -> None:
    """Attach in this process or a daemon, of whose PID `words` tells; print the trace's directory."""
    if background:
        from mxprobe.attach.daemon import LOG_NAME, run_in_background

        log = directory / LOG_NAME
        click.echo(f"{words(run_in_background(attach, log))} (log: {log})", err=True)
    else:
        attach(lambda: None)
    click.echo(directory)


def _limit(ctx: click.Context) -> float:
    """Return no limit where --every is given: it says what the probe may cost."""
    return DEFAULT_MAX_OVERHEAD if ctx.get_parameter_source("every") is ParameterSource.DEFAULT else 0.0


def _targets(pids: tuple[int, ...], *, job: bool, ray: str | None, wait_s: float) -> targets.Targets:
    say = partial(click.echo, err=True)
    if ray is None:
        targets.require(pids)
        return targets.look_up_all(pids, job=job, wait_s=wait_s, say=say)
    if pids or job:
        raise UsageError(
            "--ray names the processes itself",
            cause="PIDs or --job were given beside it",
            remedy="leave them out, or attach to the PIDs without --ray",
        )
    return targets.look_up_ray(ray, say)


def _attach_nodes(found: targets.Targets, directory: Path, *, background: bool) -> None:
    """Attach on each node with the options given here; the shares come together in one directory."""
    import threading

    from mxprobe.attach.group import signals_handled
    from mxprobe.attach.ray_cluster import record
    from mxprobe.attach.trace_recorder import check_free

    check_free(directory)
    facts = {"command_line": ["mxprobe", *sys.argv[1:]], "job": found.job}
    address = str((found.job or {})["ray"])
    over = threading.Event()

    def attach(ready: Callable[[], None]) -> None:
        with signals_handled(over.set):
            options = _of_each_node(sys.argv[1:])
            record(address, directory, found.nodes, options, facts, on_attached=ready, over=over)

    n_nodes = len(found.nodes)
    _run(attach, directory, background, lambda pid: f"attached on {n_nodes} nodes; `kill -INT {pid}` detaches")


_NOT_OF_A_NODE = {"--ray": 1, "-o": 1, "--output": 1, "--background": 0}
"""Options that are this process's own affair, and how many words follow them."""


def _of_each_node(arguments: Sequence[str]) -> list[str]:
    """Return the options of this command line without those that are not for each node's own attach."""
    words = list(arguments)
    words = words[words.index("attach") + 1 :]
    kept: list[str] = []
    while words:
        word = words.pop(0)
        name = word.partition("=")[0]
        if name in _NOT_OF_A_NODE:
            del words[: _NOT_OF_A_NODE[name] if "=" not in word else 0]
        elif not (word.startswith("-o") and not word.startswith("--")):
            kept.append(word)
    return kept


def _record(found: targets.Targets, options: AttachOptions, *, ready: Callable[[], None]) -> None:
    from mxprobe.attach.group import Group
    from mxprobe.attach.progress import Progress
    from mxprobe.attach.refusals import ENDINGS

    progress = Progress()
    for outcome in Group(found.processes, options, progress, on_attached=ready).run():
        ended = ENDINGS.get(outcome.reason, outcome.reason)
        steps = "" if outcome.steps is None else f" after {outcome.steps} steps"
        progress.say(f"{ended}{steps}; {outcome.n_rows} rows in {outcome.directory}", outcome.name)
