"""Curves into TensorBoard, Weights & Biases or trackio, through their own libraries, after the fact."""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from mxprobe.errors import UsageError
from mxprobe.trace import Trace

from .series import Point, curves


class Tracker(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


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
    library = _require(tracker)
    points = curves(trace, modules)
    if not points:
        raise UsageError(
            f"{trace.directory} has no curve to log",
            cause="no step was probed and no metric was seen",
            remedy="`mxprobe export TRACE --format csv` writes what there is",
        )
    config = {key: value for key, value in trace.run.items() if isinstance(value, (str, int, float, bool, list, dict))}
    match tracker:
        case Tracker.TENSORBOARD:
            return _to_tensorboard(points, directory / name)
        case Tracker.WANDB:
            return _to_wandb(library, points, config, project, name, directory)
        case Tracker.TRACKIO:
            return _to_trackio(library, points, config, project, name)


def _require(tracker: Tracker) -> Any:
    try:
        return importlib.import_module(tracker.value)
    except ImportError as error:
        raise UsageError(
            f"{tracker.value} is not usable here: {error}",
            cause="mxprobe itself does not need it, so it is an extra",
            remedy=f'pip install {tracker.value}, or pip install "mxprobe[exporters]"',
        ) from None


def _to_tensorboard(points: list[Point], directory: Path) -> str:
    # Generated and untyped modules: imported by name, so that they are Any and not unknown.
    proto = "tensorboard.compat.proto"
    event, summary = (importlib.import_module(f"{proto}.{name}_pb2") for name in ("event", "summary"))
    files = importlib.import_module("tensorboard.summary.writer.event_file_writer")

    if directory.exists() and any(directory.glob("events.out.tfevents.*")):
        raise UsageError(
            f"{directory} holds a TensorBoard run already",
            cause="it was exported before; TensorBoard would draw both on top of each other",
            remedy="name another run with --name, or remove that one",
        )
    try:
        writer = files.EventFileWriter(str(directory))
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror or error}") from None
    for point in points:
        values = [summary.Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
        writer.add_event(
            event.Event(step=point.step, wall_time=point.time_ns / 1e9, summary=summary.Summary(value=values))
        )
    writer.close()
    return f"{directory} (tensorboard --logdir {directory.parent})"


def _to_wandb(wandb: Any, points: list[Point], config: dict[str, Any], project: str, name: str, directory: Path) -> str:
    """WANDB_MODE, WANDB_API_KEY and the like count as always."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off")  # our own output is no part of the run
        run = wandb.init(
            project=project, name=name, dir=str(directory), config=config, settings=settings, reinit="create_new"
        )
        for point in points:
            run.log(point.values, step=point.step)
        run.finish()
    except (wandb.Error, OSError) as error:
        raise UsageError(
            f"wandb refused: {error}",
            cause="not logged in, or no network",
            remedy="`wandb login`, or WANDB_MODE=offline and `wandb sync` later",
        ) from None
    return str(Path(run.dir).parent if run.offline else run.url)


def _to_trackio(trackio: Any, points: list[Point], config: dict[str, Any], project: str, name: str) -> str:
    """Its words go to standard error: standard output is for data."""
    with contextlib.redirect_stdout(sys.stderr):
        trackio.init(project=project, name=name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        for point in points:
            trackio.log(point.values, step=point.step)
        trackio.finish()
    return f"project {project}, run {name} (trackio show --project {project})"
