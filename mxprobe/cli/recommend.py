"""`mxprobe recommend`: the verdict of a trace on one screen, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import engine_option, escape, note, require_measurements, table
from mxprobe.errors import UsageError
from mxprobe.numbers import NOTHING, fixed, interval, number, percent, whole_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from mxprobe.attribution import CorrectionScore, Recommendation
    from mxprobe.attribution.exclusion import ExclusionCurve
    from mxprobe.attribution.recommendation import PaperColumn

_KEY_EVIDENCE = (
    *("log_prob", "mismatch", "weight_lag", "held_weights", "rule_mismatch", "realised_over_predicted", "component"),
    "where",
)
_SHORT_SNIPPET_LINES = 12
_AFTER_KNEE, _MAX_POINTS = 3, 24
_CAPTION = (
    "gain: part of the GEMM-output error removed, measured; held: on steps that did not choose; recovery: part of the "
    "named component mended; cost: extra GEMM passes, estimated; opt: the framework has an option for it; cures: "
    "symptom under its gate, predicted; *: nothing else gains as much for less"
)


@click.command("recommend")
@click.argument("trace", type=click.Path(path_type=Path))
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema mxprobe.recommend/1) on standard output.")
@click.option(
    "--explain",
    is_flag=True,
    help="Show all evidence, what neighbouring papers measure, caveats, thresholds and the snippet.",
)
@click.option("--framework", help="Whose option or code the snippet uses; by default the framework found in the trace.")
@click.option(
    "--device",
    type=click.Choice(["b200", "b300", "mi355"]),
    help="Whose GEMM rates costs are taken at; by default those of a B200.",
)
@click.option(
    "--threshold",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change a gate, e.g. mismatch=0.01. Repeatable.",
)
def command(
    trace: Path,
    engine: str,
    as_json: bool,
    explain: bool,
    framework: str | None,
    device: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Say whether quantization hurts the run, which component, where, and which correction to switch on.

    The verdict rests on the trace alone. Numbers are called measured, predicted, or associated with: three
    different things.
    """
    from mxprobe.attribution import recommend
    from mxprobe.config import load
    from mxprobe.trace import open_trace

    opened = open_trace(trace, engine=engine)
    thresholds = load(sections=("verdict",)).thresholds().replace(**dict(_parse(text) for text in overrides))
    if device is not None:
        thresholds = thresholds.replace(device=device)
    recommendation = recommend(opened, thresholds, framework=framework, neighbours=as_json or explain)
    for problem in opened.problems:
        note(problem)
    events = opened.events()
    for event in events[events["kind"].astype(str) == "flight"].itertuples():
        note(f"flight recorder at step {event.step}: {event.detail}")
    if as_json:
        click.echo(json.dumps(recommendation.to_json(), indent=2, allow_nan=False))
    else:
        show(recommendation, explain=explain, with_snippet=explain or framework is not None)
    require_measurements(opened)


def show(
    recommendation: Recommendation, *, explain: bool = False, with_snippet: bool = False, console: Console | None = None
) -> None:
    """Print a recommendation to standard output, or to the console given."""
    from rich.console import Console
    from rich.padding import Padding

    from mxprobe.attribution.words import update_words

    out = console or Console(highlight=False)
    agreement, coverage = recommendation.agreement, recommendation.coverage
    words, headline = recommendation.plain_words, recommendation.headline
    title = headline if headline.casefold().startswith(words.casefold()) else f"{words.upper()}: {headline}"
    out.print(f"[bold]{escape(title)}[/]\n")
    stable = "unknown" if agreement.value is None else fixed(agreement.value)
    seen = "unknown" if coverage.flops_frac is None else whole_percent(coverage.flops_frac)
    seen = f"seen {seen}" if not coverage.because else f"0 % covered, because {coverage.because}"
    out.print(f"resample agreement {stable} (n = {agreement.n}) · forward GEMM work {escape(seen)}\n")
    for item in recommendation.evidence:
        if explain or item.name.startswith(_KEY_EVIDENCE):
            mark = {True: "yes", False: "no", None: ""}[item.holds]
            gate = f"gate {number(item.threshold)}{': ' if mark else ''}{mark}"
            gate = "" if item.threshold is None else f" [dim]({gate})[/]"
            out.print(Padding(f"[dim]{item.certainty}:[/] {escape(item.text)}{gate}", (0, 0, 0, 2)))
    if recommendation.corrections:
        out.print()
        out.print(_corrections(recommendation))
    out.print(f"\n[bold]What would change this.[/] {escape(recommendation.what_would_change)}")
    snippet = recommendation.snippet
    if snippet is not None:
        if with_snippet or snippet.text.count("\n") <= _SHORT_SNIPPET_LINES:
            out.print(f"\n[bold]Snippet[/] ({escape(snippet.framework)}, {escape(snippet.language)})")
            out.print(escape(snippet.text), soft_wrap=True)
        else:
            how = f"mxprobe recommend TRACE --framework {escape(snippet.framework)}"
            out.print(f"\nThe code that switches it on: [bold]{how}[/]")
    if explain:
        for curve in recommendation.exclusion:
            _show_exclusion(out, curve)
        if recommendation.updates is not None:
            out.print("\n[bold]Do updates reach the quantized weights?[/]")
            out.print(Padding(escape(update_words(recommendation.updates)), (0, 0, 0, 2)))
        if recommendation.neighbours:
            _show_neighbours(out, recommendation.neighbours)
        out.print("\n[bold]Caveats[/]")
        for caveat in recommendation.caveats:
            out.print(Padding(f"- {escape(caveat)}", (0, 0, 0, 2)))
        out.print("\n[bold]Thresholds[/]")
        out.print(Padding(", ".join(f"{k} = {v}" for k, v in vars(recommendation.thresholds).items()), (0, 0, 0, 2)))
    elif recommendation.caveats:
        out.print(f"[dim]{len(recommendation.caveats)} caveats: --explain[/]")


_LEFT_BY = {
    "delta2": "; what stays in the kept ones is the Delta2 of their error in that format",
    "output_error": "; what stays in the kept ones is guessed from output errors, for this trace holds no Delta2 of it",
}


def _show_exclusion(out: Console, curve: ExclusionCurve) -> None:
    """Print the curve around its knee, and the pattern list of the modules up to it."""
    from rich.padding import Padding

    out.print(
        f"\n[bold]Keeping modules in {curve.kept_in}[/]: predicted KL against share of forward GEMM work "
        f"(Delta2 of {curve.n_microbatches} microbatches{_LEFT_BY.get(curve.left_by, '')})"
    )
    last = len(curve.points) - 1
    shown = sorted({*range(min(curve.knee + _AFTER_KNEE, last) + 1), last})
    if len(shown) > _MAX_POINTS:
        shown = [*shown[:3], *shown[-(_MAX_POINTS - 3) :]]
    before = -1
    for k in shown:
        point = curve.points[k]
        gap = "[dim]...[/]\n" if k > before + 1 else ""
        mark = " [bold]<- knee[/]" if k == curve.knee else ""
        text = f"{gap}{k:>4}  {percent(point.flops_frac):>7}  {number(point.predicted_kl):>8} nats  "
        out.print(Padding(f"{text}{escape(point.module or 'nothing kept')}{mark}", (0, 0, 0, 2)), soft_wrap=True)
        before = k
    if curve.patterns:
        out.print(f"  exactly these, as {escape(curve.framework)} spells it:")
        out.print(escape(json.dumps(list(curve.patterns))), soft_wrap=True)


def _show_neighbours(out: Console, columns: Sequence[PaperColumn]) -> None:
    """Print the columns that the trace holds, then the others by the reason for which they are withheld."""
    from rich.padding import Padding

    out.print(
        "\n[bold]What neighbouring papers measure[/]: median over modules \\[middle 80 %]; no part of the verdict"
    )
    withheld: dict[str, list[str]] = {}
    for column in columns:
        if column.withheld or column.median is None:
            withheld.setdefault(column.withheld, []).append(column.name)
            continue
        spread = f" \\[{number(column.low or 0.0)}, {number(column.high or 0.0)}]" if column.n > 1 else ""
        unit = f" {column.unit}" if column.unit in ("dB", "loss") else ""
        where = f"; largest: {escape(column.largest)}" if column.n > 1 else ""
        about = f"[dim]{escape(column.definition)} ({escape(column.source)}){where}[/]"
        out.print(Padding(f"{column.name} {number(column.median)}{spread}{unit}  {about}", (0, 0, 0, 2)))
    for why, names in withheld.items():
        out.print(Padding(f"withheld: {', '.join(names)}: {escape(why)}", (0, 0, 0, 2)))


def _parse(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UsageError(f"--threshold {text!r} is not NAME=VALUE with a number", remedy="e.g. mismatch=0.01") from None


def _corrections(recommendation: Recommendation) -> Table:
    # The last column wraps where the terminal is narrow: no number may be cut off.
    head = ("correction", "gain [95 %]", "held", "recovery", "cost", "opt", "")
    scores = recommendation.corrections
    rows = [
        (
            score.correction + ("*" if score.is_pareto else ""),
            interval(score.gain, score.gain_low, score.gain_high, fixed),
            fixed(score.held_out_gain),
            whole_percent(score.recovery),
            fixed(score.cost_gemm),
            {True: "yes", False: "no", None: NOTHING}[score.engine_has_it],
            _remark(score, is_chosen=score.correction in recommendation.chosen),
        )
        for score in scores
    ]
    bold = {i for i, score in enumerate(scores) if score.correction in recommendation.chosen}
    drawn = table(head, rows, right=(1, 2, 3, 4), bold=bold, legend=_CAPTION)
    for i in (0, 5):
        drawn.columns[i].no_wrap = True
    last = [i for i, score in enumerate(scores) if score.tier == 1][-1:]
    for i in last:
        drawn.rows[i].end_section = True
    return drawn


def _remark(score: CorrectionScore, *, is_chosen: bool) -> str:
    words = ["named"] if is_chosen else []
    if score.is_active:
        words.append("already on")
    if score.cures:
        words.append("cures")
    if score.tier == 2:
        words.append("other format")
    return ", ".join(words)
