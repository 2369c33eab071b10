"""`mxprobe run -- python train.py`: start a job that listens for an attach."""

import os
import sys
import time
from pathlib import Path

import click

from mxprobe.errors import UsageError

_STARTUP = Path(__file__).parent.parent / "attach" / "startup"
_WAIT_FOR_TORCH = "24h"
_START_UP_S = 1.0  # until the interpreter is one


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Attach as soon as torch is there, and write this trace."
)
@click.option("--record", is_flag=True, help="With -o: keep a flight recorder's past from the first steps on.")
@click.option(
    "--emulate",
    metavar="RECIPE",
    help="Emulate every model that the job trains under a recipe: its name, a line or a .toml file.",
)
@click.option(
    "--plant-probes",
    is_flag=True,
    help="Plant operators in nn.Linear that an attach can use inside torch.compile; not bit for bit.",
)
@click.argument("job", nargs=-1, required=True, type=click.UNPROCESSED)
def command(output: Path | None, emulate: str | None, record: bool, plant_probes: bool, job: tuple[str, ...]) -> None:
    """Start JOB so that it and its Python children can be attached without ptrace.

    \b
      mxprobe run -- python train.py --config my.yaml
      mxprobe run -- torchrun --nproc-per-node=8 train.py
      mxprobe run --emulate "paper@rollout" -o run.mxprobe -- python train.py
      mxprobe run --plant-probes -o run.mxprobe -- python compiled.py

    This process becomes the job: same PID, terminal, signals and exit code. Nothing is probed until somebody
    attaches (one sleeping thread per process); with -o, that is done at once for the process started here, or
    for every rank that a torchrun or accelerate started here has on this machine.

    --emulate changes the training: each model is emulated, as by `mxprobe.emulate(model, RECIPE)`, when its optimizer
    is built, and what was left out is printed. `NAME@rollout` is for generation alone, `NAME@train` for all else.

    --plant-probes changes what torch.compile makes of a model: an operator that does nothing stands behind each
    nn.Linear in a training graph, until a probed step, in which it shows operands and output. The run is not bit
    for bit what it is without. Nothing else sees calls inside a compiled graph while it runs as compiled.
    """
    from mxprobe.attach.distributed_job import is_launcher

    if record and output is None:
        raise UsageError(
            "--record needs -o", remedy="name the trace's directory with -o, or attach later with --record"
        )
    environ = dict(os.environ)
    environ["MXPROBE_LISTEN"] = "1"
    others = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *([others] if others else [])])
    if emulate is not None:
        environ |= _emulation(emulate)
    if plant_probes:
        environ["MXPROBE_PLANT"] = "1"
    if output is not None:
        _attach_later(os.getpid(), output, ranks=is_launcher(job), record=record)
    try:
        os.execvpe(job[0], list(job), environ)
    except OSError as error:
        raise UsageError(
            f"cannot start {job[0]}: {error.strerror}",
            cause="it is not on PATH, or not executable",
            remedy="write the command as you would without mxprobe, after `--`",
        ) from None


def _emulation(text: str) -> dict[str, str]:
    """Return what the start-up hook reads. UsageError for a recipe that cannot be read."""
    import mxprobe
    import mxprobe_kernels
    from mxprobe.emulation.recipe import Recipe

    packages = (str(Path(str(package.__file__)).parent) for package in (mxprobe_kernels, mxprobe))
    return {"MXPROBE_EMULATE": str(Recipe.parse(text)), "MXPROBE_PACKAGES": os.pathsep.join(packages)}


def _attach_later(pid: int, output: Path, *, ranks: bool, record: bool) -> None:
    """Start `mxprobe attach` beside the job, as nobody's child: the job must not come to wait for it."""
    from mxprobe.attach.daemon import LOG_NAME, fork_daemon
    from mxprobe.trace.object_store import name_of, url_of

    url = url_of(output)
    beside = output if url is None else Path(name_of(url))
    beside.mkdir(parents=True, exist_ok=True)
    attach = [sys.executable, "-m", "mxprobe", "attach", str(pid), "-o", str(output), "--wait", _WAIT_FOR_TORCH]
    attach += [*(["--job"] if ranks else []), *(["--record"] if record else [])]
    became_job, until_exec = os.pipe()  # closed on exec: its end says that this process has become the job
    if not fork_daemon(beside / LOG_NAME):
        os.close(became_job)
        return
    try:
        os.close(until_exec)
        os.read(became_job, 1)
        time.sleep(_START_UP_S)
        os.execv(attach[0], attach)
    finally:
        os._exit(0)
