"""`mxprobe trigger PID...`."""

import click

from mxprobe.cli import targets

_TIMEOUT_S = 10.0


@click.command("trigger")
@targets.argument
@targets.job_option
def command(pids: tuple[int, ...], job: bool) -> None:
    """Have attached processes go to full statistics now, weights included, for the next probed steps.

    With `mxprobe attach --record` the flight recorder writes its past as well: the norm of each output and gradient
    in the last 64 steps, table `flight` of the trace.
    """
    named = targets.named(pids, job=job)
    missing: list[int] = []
    for pid in named:
        answer = targets.ask(pid, "trigger", timeout_s=_TIMEOUT_S)
        if answer is None or not answer["recording"]:
            missing.append(pid)
            continue
        past = "its past is written, and " if answer["past"] else "(no past: attached without --record) "
        click.echo(f"triggered {pid}: {past}full statistics follow", err=True)
    if missing and not (job and len(missing) < len(named)):
        who = f"Process {missing[0]} is" if len(missing) == 1 else f"Processes {', '.join(map(str, missing))} are"
        raise targets.not_attached(
            f"{who} not being recorded.",
            cause="never attached, still waiting for a first step, detached already, or attached by another user",
        )
