"""`mxprobe run -- python train.py`: start a job that listens for an attach."""

import os
import subprocess
import sys
from pathlib import Path

import click

from mxprobe.errors import UsageError

_STARTUP = Path(__file__).parent.parent / "attach" / "startup"
_WAIT_FOR_TORCH = "24h"


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Attach as soon as torch is there, and write this trace."
)
@click.argument("job", nargs=-1, required=True, type=click.UNPROCESSED)
def command(output: Path | None, job: tuple[str, ...]) -> None:
    """Start JOB so that it and its Python children can be attached without ptrace.

    \b
      mxprobe run -- python train.py --config my.yaml

    This process becomes the job: same PID, terminal, signals and exit code. Nothing is probed until somebody
    attaches (one sleeping thread per process); with -o, that is done at once for the process started here.
    """
    environ = dict(os.environ)
    environ["MXPROBE_LISTEN"] = "1"
    others = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *([others] if others else [])])
    if output is not None:
        _attach_later(os.getpid(), output)
    try:
        os.execvpe(job[0], list(job), environ)
    except OSError as error:
        raise UsageError(
            f"cannot start {job[0]}: {error.strerror}",
            cause="it is not on PATH, or not executable",
            remedy="write the command as you would without mxprobe, after `--`",
        ) from None


def _attach_later(pid: int, output: Path) -> None:
    """Start `mxprobe attach` beside the job, as nobody's child: the job must not come to wait for it."""
    output.mkdir(parents=True, exist_ok=True)
    attach = [sys.executable, "-m", "mxprobe", "attach", str(pid), "-o", str(output), "--wait", _WAIT_FOR_TORCH]
    middle = os.fork()
    if middle == 0:
        code = 1
        try:
            with (output / "mxprobe.log").open("ab") as log:
                subprocess.Popen(attach, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            code = 0
        finally:
            os._exit(code)
    os.waitpid(middle, 0)
