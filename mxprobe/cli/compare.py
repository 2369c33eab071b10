"""`mxprobe compare A B`: did the correction work?"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import escape, note, table, writing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from mxprobe.comparison import Comparison, tables

_ERRORS_SHOWN = 12
_LONGEST_CELL = 60


@click.command("compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema mxprobe.compare/1) on standard output.")
@click.option("--all", "show_all", is_flag=True, help="Show every error that both runs measured, clear or not.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write it to this file, too, as one offline HTML page with the curves of both runs.",
)
@click.option(
    "--by",
    type=click.Choice(["step", "tokens"]),
    default="step",
    show_default=True,
    help="What the runs are aligned by; tokens: those the framework has logged as seen, where steps differ in size.",
)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Take [verdict] from this file.")
def command(a: Path, b: Path, as_json: bool, show_all: bool, output: Path | None, by: str, config: Path | None) -> None:
    """Say what changed from run A to run B: settings, errors, reward, and whether a correction did what A predicted.

    Both are aligned by step, or by the tokens seen. Intervals are 95 % and respect that neighbouring steps are alike.
    """
    from mxprobe.comparison import compare
    from mxprobe.comparison.tokens import TokenTrace
    from mxprobe.config import load
    from mxprobe.trace import open_trace

    thresholds = load(config=config, sections=("verdict",)).thresholds()
    traces = open_trace(a), open_trace(b)
    if by == "tokens":
        traces = TokenTrace(traces[0]), TokenTrace(traces[1])
    comparison = compare(*traces, thresholds)
    if output is not None:
        from mxprobe_reports import write_comparison

        with writing(output):
            write_comparison(*traces, comparison, output, command_line=shlex.join(["mxprobe", *sys.argv[1:]]))
        click.echo(f"page: {output}", err=True)
    for warning in comparison.alignment.warnings:
        note(warning)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), indent=2, allow_nan=False))
    else:
        show(comparison, show_all=show_all)


def show(comparison: Comparison, *, show_all: bool = False, console: Console | None = None) -> None:
    """Print a comparison to standard output, or to the console given."""
    from rich.console import Console

    from mxprobe.comparison import tables

    out = console or Console(highlight=False)
    alignment = comparison.alignment
    words = f"{alignment.unit} {alignment.a.words} of both" if alignment.is_aligned else "each over its own"
    out.print(f"A  {escape(comparison.a)}\nB  {escape(comparison.b)}  ({words})\n", soft_wrap=True)
    out.print(f"[bold]{escape(comparison.headline)}[/]\n")
    out.print(escape(comparison.prediction.text))
    if comparison.config:
        out.print("\n[bold]What was different[/]")
        out.print(_drawn(tables.settings(comparison)))
    if comparison.signals:
        out.print("\n[bold]Metrics[/] [dim]mean of the last quarter; trend over all of them[/]")
        out.print(_drawn(tables.metrics(comparison)))
    clear, n_errors = tables.clear_errors(comparison), len(comparison.errors)
    shown = comparison.errors if show_all else clear[:_ERRORS_SHOWN]
    counted = f"{len(clear)} of {n_errors} changed clearly"
    out.print(f"\n[bold]Errors[/] [dim]relative, squared; geometric mean over probed steps; {counted}[/]")
    if shown:
        out.print(_drawn(tables.errors(shown)))
    if len(shown) < n_errors:
        out.print(f"[dim]{n_errors - len(shown)} more: --all[/]")


def _drawn(shown: tables.Table) -> RichTable:
    return table(shown.head, [[_cut(cell) for cell in row] for row in shown.rows], right=shown.numeric, bold=shown.bold)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"
