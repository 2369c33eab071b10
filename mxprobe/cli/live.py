"""`mxprobe live DIR-or-PID`: the terminal view of a run that is being recorded."""

from __future__ import annotations

from pathlib import Path

import click

from mxprobe.cli.param_types import Duration


@click.command("live")
@click.argument("target", metavar="DIR-or-PID")
@click.option("--interval", type=Duration(), default=1.0, show_default=True, help="Look for new rows so often.")
@click.option("--once", is_flag=True, help="Print the picture once and leave.")
def command(target: str, interval: float, once: bool) -> None:
    """Watch a trace while it is written: symptoms, top layers by output error, overhead, drops.

    TARGET is a trace directory (of another machine over ssh, of a finished run, ...) or the PID of an attached
    process. It only reads the trace; the run does not notice. Without a terminal it prints a line per new step and
    ends with the trace; NO_COLOR is respected.

    Keys: s sort, r reverse, / filter, j k scroll, p pause, q quit.
    """
    from mxprobe.live import find_trace, watch

    directory: Path = find_trace(target, say=lambda text: click.echo(text, err=True))
    watch(directory, interval_s=interval, once=once)
