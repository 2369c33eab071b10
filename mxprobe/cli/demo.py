"""`mxprobe demo`: a real GRPO run, attached live, judged; then again with the advice followed, and compared."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import table
from mxprobe.demo.runner import PROBE_EVERY, STEPS, WHAT_RUNS, DemoPaths, Scenario, Step, record, replay, require_trl
from mxprobe.errors import UsageError
from mxprobe.numbers import interval, number

if TYPE_CHECKING:
    from rich.console import Console

    from mxprobe.demo.second_run import Prediction


@click.command("demo")
@click.option(
    "--scenario",
    type=click.Choice([s.value for s in Scenario]),
    default=Scenario.OUTLIERS.value,
    show_default=True,
    help="What the training job runs.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the training job.")
@click.option("--once", is_flag=True, help="Do not run again with the recommended correction.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to write (must not exist yet).")
def command(scenario: str, seed: int, once: bool, output: Path | None) -> None:
    """Train a tiny Qwen3 with TRL's GRPO on the CPU, attach to it from outside, report, recommend.

    Where a correction is recommended, the job runs a second time, same seed, with the recommended code applied, and
    the two are compared: errors, reward, entropy, and the disagreement of rollout and trainer against what the first
    run foretold. The job is a plain Python script in a process of its own. Takes one to three minutes.
    """
    require_trl()
    from rich.console import Console
    from rich.markup import escape

    from mxprobe.attribution import recommend
    from mxprobe.cli import compare as compare_command
    from mxprobe.cli.recommend import show
    from mxprobe.comparison import compare
    from mxprobe.demo.second_run import mismatch_of, predict
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
    _record_with_progress(chosen, paths, status, seed=seed, apply=None)

    trace = open_trace(paths.trace)
    recommendation = recommend(trace)
    write_report(trace, recommendation, paths.report)
    show(recommendation)

    snippet = recommendation.snippet
    if recommendation.chosen and snippet is not None and snippet.language == "python" and not once:
        paths.correction.write_text(snippet.text)
        paths.second.directory.mkdir()
        first = replay(chosen, paths, seed=seed, correction=paths.correction)
        status.print(f"\n[bold]again[/], same seed, with that code applied ({escape(str(paths.correction))}) …")
        _record_with_progress(chosen, paths.second, status, seed=seed, apply=paths.correction)
        corrected = open_trace(paths.second.trace)
        write_report(corrected, recommend(corrected), paths.second.report)
        compare_command.show(compare(trace, corrected))
        second = replay(chosen, paths.second, seed=seed, correction=paths.correction)
        _show_predictions(predict(first, second, (mismatch_of(trace), mismatch_of(corrected))))

    written = [paths.trace, paths.report, paths.second.trace, paths.second.report]
    status.print("\nwritten " + escape("\n        ".join(str(path) for path in written if path.exists())))
    status.print(f"[dim]{time.monotonic() - started:.0f} s in all[/]")


def _show_predictions(found: tuple[Prediction, ...]) -> None:
    from rich.console import Console

    out = Console(highlight=False)
    rows = [
        (
            each.measure,
            number(each.before),
            interval(each.predicted, each.low, each.high),
            number(each.after),
            str(each.outcome),
        )
        for each in found
    ]
    out.print()
    head = ("rollout against trainer", "first run", "predicted", "second run", "")
    out.print(table(head, rows, right=(1, 2, 3), is_lined=False))
    out.print("[dim]nats per token. The trainer is in high precision: its gradients hold no error to correct.[/]")


def _record_with_progress(
    scenario: Scenario, paths: DemoPaths, status: Console, *, seed: int, apply: Path | None
) -> None:
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
            trace = escape(str(paths.trace))
            progress.console.print(f"attaching: mxprobe attach {pid} --every {PROBE_EVERY} -o {trace}")
            progress.update(task, description="attached")

        def on_step(step: Step) -> None:
            progress.update(task, completed=step.step, reward=step.reward, entropy=step.entropy)

        record(scenario, paths, seed=seed, apply=apply, on_attached=on_attached, on_step=on_step)
        progress.update(task, description="detached", completed=STEPS)
