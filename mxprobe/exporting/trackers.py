"""Curves into TensorBoard, Weights & Biases or trackio, through their own libraries."""

import contextlib
import importlib
import sys
from collections.abc import Generator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from mxprobe.errors import UsageError
from mxprobe.trace import Trace

from .series import Point, curves

STEP = "mxprobe/step"
"""wandb draws the curves over it. Its own step only ever grows, and rows of an earlier one would be dropped."""
_FLUSH_S = 5
"""TensorBoard shows what was logged at most so late."""


class Tracker(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class TrackerRun(Protocol):
    """A run of a tracker that takes points in any order."""

    def log(self, point: Point) -> None: ...

    def close(self) -> str:
        """Finish the run and say, in words, where it is."""
        ...


def export_to(
    tracker: Tracker, trace: Trace, *, project: str, name: str, directory: Path, modules: Sequence[str] = ()
) -> str:
    """Log all curves as one run and say, in words, where it is.

    Args:
        project: project of wandb and trackio.
        name: the run's name; for TensorBoard a directory below `directory`.
        directory: where TensorBoard and wandb write; trackio uses its own (TRACKIO_DIR).
        modules: globs of modules whose curves are logged one by one, too.

    Raises:
        UsageError: the library is not installed, or refuses.
        TraceError: a table cannot be read.
    """
    require(tracker)
    points = curves(trace, modules)
    if not points:
        raise no_curve(trace.directory)
    run = open_run(tracker, trace.run, project=project, name=name, directory=directory)
    for point in points:
        run.log(point)
    return run.close()


def open_run(tracker: Tracker, facts: dict[str, Any], *, project: str, name: str, directory: Path) -> TrackerRun:
    """Begin a new run; `facts` (run.json) become its configuration where the tracker has one.

    Raises:
        UsageError: the library is not installed, or refuses.
    """
    library = require(tracker)
    config = {key: value for key, value in facts.items() if isinstance(value, (str, int, float, bool, list, dict))}
    match tracker:
        case Tracker.TENSORBOARD:
            return _TensorBoardRun(directory / name)
        case Tracker.WANDB:
            return _WandbRun(library, config, project, name, directory)
        case Tracker.TRACKIO:
            return _TrackioRun(library, config, project, name)


def require(tracker: Tracker) -> Any:
    """Import the tracker's library. UsageError where it is not installed."""
    try:
        return importlib.import_module(tracker.value)
    except ImportError as error:
        raise UsageError(
            f"{tracker.value} is not usable here: {error}",
            cause="mxprobe itself does not need it, so it is an extra",
            remedy=f'pip install {tracker.value}, or pip install "mxprobe[exporters]"',
        ) from None


def no_curve(directory: Path) -> UsageError:
    return UsageError(
        f"{directory} has no curve to log",
        cause="no step was probed and no metric was seen",
        remedy="`mxprobe export TRACE --format csv` writes what there is",
    )


class _TensorBoardRun:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        if directory.exists() and any(directory.glob("events.out.tfevents.*")):
            raise UsageError(
                f"{directory} holds a TensorBoard run already",
                cause="it was exported before; TensorBoard would draw both on top of each other",
                remedy="name another run with --name, or remove that one",
            )
        try:
            self._writer: Any = SummaryWriter(str(directory), flush_secs=_FLUSH_S)
        except OSError as error:
            raise UsageError(f"cannot write to {directory}: {error.strerror or error}") from None

    def log(self, point: Point) -> None:
        for tag, value in point.values.items():
            self._writer.add_scalar(tag, value, point.step, walltime=point.time_ns / 1e9)

    def close(self) -> str:
        self._writer.close()
        return f"{self._directory} (tensorboard --logdir {self._directory.parent})"


class _WandbRun:
    """WANDB_MODE, WANDB_API_KEY and the like count as always."""

    def __init__(self, wandb: Any, config: dict[str, Any], project: str, name: str, directory: Path) -> None:
        self._wandb = wandb
        with self._refusals():
            directory.mkdir(parents=True, exist_ok=True)
            settings = wandb.Settings(console="off")  # our own output is no part of the run
            self._run = wandb.init(
                project=project, name=name, dir=str(directory), config=config, settings=settings, reinit="create_new"
            )
            for pattern in ("signals/*", "mxprobe/*"):
                self._run.define_metric(pattern, step_metric=STEP)

    def log(self, point: Point) -> None:
        with self._refusals():
            self._run.log({**point.values, STEP: point.step})

    def close(self) -> str:
        with self._refusals():
            self._run.finish()
        return str(Path(self._run.dir).parent if self._run.offline else self._run.url)

    @contextlib.contextmanager
    def _refusals(self) -> Generator[None]:
        try:
            yield
        except (self._wandb.Error, OSError) as error:
            raise UsageError(
                f"wandb refused: {error}",
                cause="not logged in, or no network",
                remedy="`wandb login`, or WANDB_MODE=offline and `wandb sync` later",
            ) from None


class _TrackioRun:
    """Its words go to standard error: standard output is for data."""

    def __init__(self, trackio: Any, config: dict[str, Any], project: str, name: str) -> None:
        self._trackio, self._project, self._name = trackio, project, name
        with contextlib.redirect_stdout(sys.stderr):
            trackio.init(project=project, name=name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def log(self, point: Point) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.log(point.values, step=point.step)

    def close(self) -> str:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()
        return f"project {self._project}, run {self._name} (trackio show --project {self._project})"
