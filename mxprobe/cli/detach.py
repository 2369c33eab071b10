"""`mxprobe detach PID`."""

import click

from mxprobe.errors import AttachError

_TIMEOUT_S = 120.0


@click.command("detach")
@click.argument("pid", type=click.IntRange(min=1))
def command(pid: int) -> None:
    """Take the probe off process PID, wait until its trace is closed, print the trace's directory.

    The hooks come out at the next optimizer step, or after a few seconds where none comes.
    """
    from mxprobe.attach.client import ask
    from mxprobe.attach.rundir import control_socket_of

    control_socket = control_socket_of(pid)
    answer = None if control_socket is None else ask(control_socket, "detach", timeout_s=_TIMEOUT_S)
    if answer is None:
        raise AttachError(
            "not_attached",
            f"Process {pid} is not attached.",
            cause="it never was, it was detached already, or another user attached to it",
            remedy="`mxprobe status` lists what is attached",
        )
    if not answer["recorded"]:
        click.echo(f"gave up attaching to {pid}", err=True)
        return
    steps = answer.get("steps")
    after = "" if steps is None else f" after {steps} steps"
    click.echo(f"detached from {pid}{after}; {answer['n_rows']} rows", err=True)
    click.echo(answer["directory"])
