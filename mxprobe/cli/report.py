"""`mxprobe report`: a trace as one self-contained HTML file."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from mxprobe.cli.common import engine_option, note, require_measurements, writing


@click.command("report")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML file; default RUN.html beside RUN.mxprobe.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="B",
    help="Lay this trace over TRACE, and say what changed from TRACE to it.",
)
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print a machine-readable summary on standard output.")
def command(trace: Path, output: Path | None, against: Path | None, engine: str, as_json: bool) -> None:
    """Write one offline HTML page: verdict, signals, where the error is, what would help, and the evidence.

    The page makes no network request and can be mailed or archived as it is.
    """
    from mxprobe.attribution import recommend
    from mxprobe.comparison import compare
    from mxprobe.config import load
    from mxprobe.trace import open_trace
    from mxprobe_reports import write_report

    opened = open_trace(trace, engine=engine)
    path = output or opened.place.with_name(f"{opened.place.name.removesuffix('.mxprobe')}.html")
    thresholds = load(sections=("verdict",)).thresholds()
    command_line = shlex.join(["mxprobe", *sys.argv[1:]])
    b = None
    if against is not None:
        other = open_trace(against, engine=engine)
        b = (other, recommend(other, thresholds), compare(opened, other, thresholds))
    with writing(path):
        report = write_report(opened, recommend(opened, thresholds), path, command_line=command_line, b=b)
    for problem in report.problems:
        note(problem)
    if as_json:
        click.echo(json.dumps({"path": str(path), "size_bytes": path.stat().st_size, **report.summary()}, indent=2))
    else:
        click.echo(str(path))
    require_measurements(opened)
