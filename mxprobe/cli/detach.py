"""`mxprobe detach PID...`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from mxprobe.cli import targets

_TIMEOUT_S = 120.0


@click.command("detach")
@targets.argument
@targets.job_option
def command(pids: tuple[int, ...], job: bool) -> None:
    """Take the probe off process PID, wait until its trace is closed, print the trace's directory.

    The hooks come out at the next optimizer step, or after a few seconds where none comes. Processes that share
    a trace leave one by one: the others go on, and the trace is closed with the last.
    """
    named = targets.named(pids, job=job)
    with ThreadPoolExecutor(len(named)) as pool:
        answers = dict(zip(named, pool.map(_detach, named), strict=True))
    missing = [pid for pid, answer in answers.items() if answer is None]
    directories: dict[str, None] = {}
    for pid, answer in answers.items():
        if answer is None:
            continue
        if not answer["recorded"]:
            click.echo(f"gave up attaching to {pid}", err=True)
            continue
        steps = answer.get("steps")
        after = "" if steps is None else f" after {steps} steps"
        click.echo(f"detached from {pid}{after}; {answer['n_rows']} rows", err=True)
        for recipe in answer.get("recipes") or []:
            click.echo(f"  it goes on under the recipe {recipe}", err=True)
        directories[answer["directory"]] = None
    for directory in directories:
        click.echo(directory)
    if missing and not (job and len(missing) < len(named)):
        many = len(missing) > 1
        raise targets.not_attached(
            f"Process{'es' if many else ''} {', '.join(map(str, missing))} {'are' if many else 'is'} not attached."
        )


def _detach(pid: int) -> dict[str, Any] | None:
    return targets.ask(pid, "detach", timeout_s=_TIMEOUT_S)
