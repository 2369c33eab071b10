"""`mxprobe compare A B`: did the correction work?"""

from __future__ import annotations

import json
import math
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import escape, folded, note, table, writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from mxprobe.comparison import Comparison
    from mxprobe.comparison.levels import ErrorChange, SignalChange
    from mxprobe.comparison.provenance import ConfigChange

_ERRORS_SHOWN = 12
_LONGEST_VALUE = 60
_escape = partial(escape, keep="\n")


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

    out = console or Console(highlight=False)
    steps = comparison.alignment.a
    unit = comparison.alignment.unit
    aligned = (
        f"{unit} {steps.first} to {steps.last} of both" if comparison.alignment.is_aligned else "each over its own"
    )
    out.print(f"A  {_escape(comparison.a)}\nB  {_escape(comparison.b)}  ({aligned})\n", soft_wrap=True)
    out.print(f"[bold]{_escape(comparison.headline)}[/]\n")
    out.print(_escape(comparison.prediction.text))
    if comparison.config:
        out.print("\n[bold]What was different[/]")
        out.print(_config(comparison.config))
    if comparison.signals:
        out.print("\n[bold]Metrics[/] [dim]mean of the last quarter; trend over all of them[/]")
        out.print(_signals(comparison.signals))
    _print_errors(comparison.errors, out, show_all=show_all)


def _print_errors(errors: Sequence[ErrorChange], out: Console, *, show_all: bool) -> None:
    clear = [each for each in errors if each.is_clear]
    clear.sort(key=lambda each: -abs(math.log(each.ratio)))
    shown = list(errors) if show_all else clear[:_ERRORS_SHOWN]
    counted = f"{len(clear)} of {len(errors)} changed clearly"
    out.print(f"\n[bold]Errors[/] [dim]relative, squared; geometric mean over probed steps; {counted}[/]")
    if shown:
        out.print(_errors(shown))
    if len(shown) < len(errors):
        out.print(f"[dim]{len(errors) - len(shown)} more: --all[/]")


def _config(changes: Sequence[ConfigChange]) -> Table:
    shown = _table("", "A", "B", "from")
    for change in changes:
        shown.add_row(*map(_escape, (change.name, _cut(change.a), _cut(change.b), change.origin)))
    return shown


def _signals(changes: Sequence[SignalChange]) -> Table:
    shown = _table("", "A", "B", "B - A [95 %]", "trend A", "trend B", right=(1, 2, 3))
    for each in changes:
        low, high = each.change.low, each.change.high
        interval = rf"{each.change.difference:+.3g} \[{low:+.3g}, {high:+.3g}]"
        style = "bold" if each.change.is_clear else None
        cells = (f"{each.a.mean:.4g}", f"{each.b.mean:.4g}", interval, each.trend_a, each.trend_b)
        shown.add_row(_escape(each.metric), *cells, style=style)
    return shown


def _errors(changes: Sequence[ErrorChange]) -> Table:
    shown = _table("", "operand", "modules", "phase", "A", "B", "B / A [95 %]", right=(4, 5, 6))
    for each in changes:
        ratio = (
            rf"{each.ratio:.2f} \[{each.ratio_low:.2f}, {each.ratio_high:.2f}]" if math.isfinite(each.ratio) else "-"
        )
        cells = (each.measure.replace("_", " "), each.role, each.kind, each.phase)
        shown.add_row(
            *map(_escape, cells), _level(each.a), _level(each.b), ratio, style="bold" if each.is_clear else None
        )
    return shown


def _table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    headed = table(*map(folded, columns))
    for position in right:
        headed.columns[position].justify = "right"
    return headed


def _level(value: float) -> str:
    return "-" if math.isnan(value) else "< 1e-6" if value < 1e-6 else f"{value:.3g}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
