"""`mxprobe export TRACE`: files at full resolution, or curves into an experiment tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mxprobe.cli.common import note
from mxprobe.errors import UsageError

_FORMATS = ("csv", "json", "parquet")
_TRACKERS = ("tensorboard", "wandb", "trackio")


@click.command("export")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--format", "format_name", type=click.Choice(_FORMATS), help="Write every row of every table as files.")
@click.option("--to", "tracker_name", type=click.Choice(_TRACKERS), help="Log curves over steps as one run.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the files; default TRACE-csv, TRACE-json, ... For a tracker, where it keeps its runs.",
)
@click.option("--upload", metavar="URL", help="Copy the trace to an object store, e.g. s3://BUCKET/NAME.mxprobe.")
@click.option("--table", "tables", multiple=True, metavar="NAME", help="With --format: only this table; repeatable.")
@click.option("--ratios", is_flag=True, help="With --format: append NMSE, output error, ... to the rows of `tensors`.")
@click.option("--overwrite", is_flag=True, help="With --format: replace files that are there.")
@click.option("--modules", multiple=True, metavar="GLOB", help="With --to: also one curve per matching module.")
@click.option("--project", default="mxprobe", show_default=True, help="With --to: the project of wandb or trackio.")
@click.option("--name", help="With --to: the run's name; default the trace's.")
@click.option("--follow", is_flag=True, help="With --to: log new rows until the recording ends, or Ctrl-C.")
def command(
    trace: Path,
    format_name: str | None,
    tracker_name: str | None,
    output: Path | None,
    upload: str | None,
    tables: tuple[str, ...],
    ratios: bool,
    overwrite: bool,
    modules: tuple[str, ...],
    project: str,
    name: str | None,
    follow: bool,
) -> None:
    """Write TRACE as CSV, JSON or Parquet at full resolution, or log it to TensorBoard, wandb or trackio.

    Prints the path of each file written, or where the run is.
    """
    if sum(way is not None for way in (format_name, tracker_name, upload)) != 1:
        raise UsageError(
            "give one of --format, --to and --upload",
            remedy=f"--format {'|'.join(_FORMATS)} writes tables, --to {'|'.join(_TRACKERS)} logs curves, "
            "--upload copies the trace as it is",
        )
    if follow and tracker_name is None:
        raise UsageError("--follow goes with --to", remedy="files are written once the recording has ended")
    from mxprobe.exporting import FileFormat, Tracker, export_files, export_to, follow_to
    from mxprobe.trace import open_trace

    if upload is not None:
        from mxprobe.trace.object_store import upload as copy

        copy(open_trace(trace).directory, upload)
        click.echo(upload)
        return
    run: dict[str, Any] = {
        "project": project,
        "name": name or trace.resolve().stem,
        "directory": output or Path("runs" if tracker_name == "tensorboard" else "."),
        "modules": modules,
    }
    if follow:
        click.echo(follow_to(Tracker(tracker_name), trace, **run, say=note))
        return
    opened = open_trace(trace)
    for problem in opened.problems:
        note(problem)
    if format_name is None:
        click.echo(export_to(Tracker(tracker_name), opened, **run))
        return
    directory = output or opened.place.with_name(f"{opened.place.stem}-{format_name}")
    for path in export_files(
        opened, directory, FileFormat(format_name), tables=tables, with_ratios=ratios, overwrite=overwrite
    ):
        click.echo(path)
