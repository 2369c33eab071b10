"""`mxprobe demo`: a real GRPO run, attached live, ending in a report and a verdict."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import click

from mxprobe.demo.runner import PROBE_EVERY, STEPS, WHAT_RUNS, DemoPaths, Scenario, Step, record, require_trl
from mxprobe.errors import UsageError


@click.command("demo")
@click.option(
    "--scenario",
    type=click.Choice([s.value for s in Scenario]),
    default=Scenario.OUTLIERS.value,
    show_default=True,
    help="What the training job runs.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the training job.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to write (must not exist yet).")
def command(scenario: str, seed: int, output: Path | None) -> None:
    """Train a tiny Qwen3 with TRL's GRPO on the CPU, attach to it from outside, report, recommend.

    The job is a plain Python script in a process of its own. Takes about two minutes.
    """
    require_trl()
    from mxprobe.cli.recommend import show
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from mxprobe.attribution import recommend
    from mxprobe.trace import open_trace
    from mxprobe_reports import write_report

    chosen = Scenario(scenario)
    paths = DemoPaths(output or Path(f"mxprobe-demo-{chosen}-{datetime.now():%Y%m%d-%H%M%S}"))
    try:
        paths.directory.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{paths.directory} exists already", remedy="name another directory with -o") from None

    status = Console(stderr=True)
    started = time.monotonic()
    status.print(f"[bold]mxprobe demo[/] · {chosen}: {WHAT_RUNS[chosen]} · seed {seed}")
    status.print(f"starting a GRPO run of {STEPS} steps (TRL, tiny Qwen3, CPU) in its own process …")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("reward {task.fields[reward]:.2f}  entropy {task.fields[entropy]:.2f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=status) as progress:
        task = progress.add_task("training", total=STEPS, reward=float("nan"), entropy=float("nan"))

        def on_attached(pid: int) -> None:
            progress.console.print(
                f"attaching: mxprobe attach {pid} --every {PROBE_EVERY} -o {escape(str(paths.trace))}"
            )
            progress.update(task, description="attached")

        def on_step(step: Step) -> None:
            progress.update(task, completed=step.step, reward=step.reward, entropy=step.entropy)

        record(chosen, paths, seed=seed, on_attached=on_attached, on_step=on_step)
        progress.update(task, description="detached", completed=STEPS)

    trace = open_trace(paths.trace)
    recommendation = recommend(trace)
    write_report(trace, recommendation, paths.report)
    show(recommendation)
    status.print(f"\ntrace   {escape(str(paths.trace))}\nreport  {escape(str(paths.report))}")
    status.print(f"[dim]{time.monotonic() - started:.0f} s in all[/]")
