"""`mxprobe replay`: what the replayed microbatches of a trace say, each number with its interval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.errors import TraceError
from mxprobe.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from mxprobe.attribution.replay_effects import Estimate
    from mxprobe.attribution.replay_summary import ReplaySummary

_MAX_ROWS = 10
_LEGEND = (
    "q: as it rounds now; high: exact; floor: exact, the batch put together otherwise; qstar: ideal scale; qstar_dz: "
    "that, deadzone restored; noise, flip: controls; q_weights: exact products of rounded weights; q_routed: q "
    "with the experts that each router chose in high: its gain is the effect of routing replay. gain: part of the "
    "KL of q removed, replayed; predicted: the same from Delta2 and the what-ifs; dW error: mean over modules of "
    "||dW - dW of high||^2 / ||dW of high||^2"
)


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema mxprobe.replay/1) on standard output.")
@click.option("--all", "show_all", is_flag=True, help="Every module and operand, not only the ten largest.")
def command(trace: Path, as_json: bool, show_all: bool) -> None:
    """Say what the counterfactual replays of a trace show: policy and gradient under each rounding.

    Replays are recorded by `mxprobe attach --replay-every N`: one training microbatch, run again in the job under other
    roundings. This command runs nothing: it derives gains, splits and controls from the sums in the trace, and holds
    predicted gains against replayed ones.
    """
    from mxprobe.attribution.replay_summary import replay_summary
    from mxprobe.trace import open_trace

    opened = open_trace(trace)
    summary = replay_summary(opened)
    for problem in opened.problems:
        click.echo(f"note: {printable(problem)}", err=True)
    if summary is None:
        events = opened.events()
        said = events.loc[events["kind"].astype(str) == "sensitivity", "detail"].astype(str).tolist()
        raise TraceError(
            f"{trace} holds no replays",
            cause=printable(said[-1]) if said else "they are off by default: each costs several steps",
            remedy="attach with --replay-every N; the first one's cost is told in the events of the trace",
        )
    if as_json:
        click.echo(json.dumps(summary.to_json(), indent=2, allow_nan=False))
    else:
        show(summary, show_all=show_all)


def show(summary: ReplaySummary, *, show_all: bool = False, console: Console | None = None) -> None:
    """Print a summary to standard output, or to the console given."""
    from rich.console import Console

    out = console or Console(highlight=False)
    steps = ", ".join(map(str, summary.steps[:8])) + (", ..." if len(summary.steps) > 8 else "")
    out.print(
        f"[bold]{summary.n_microbatches} microbatches replayed[/] (steps {steps}), {summary.n_tokens:.0f} tokens, "
        f"{summary.n_modules} Linears; KL {'exact' if summary.estimator == 'exact' else 'by ' + summary.estimator}"
    )
    _show_arms(out, summary)
    for name, split, structure in (
        ("KL", summary.kl_split, summary.kl_structure),
        ("weight gradients' squared error", summary.gradient_split, summary.gradient_structure),
    ):
        if split:
            parts = ", ".join(f"{part} {_estimate(value)}" for part, value in split.items())
            out.print(f"\n[bold]Split of the {name}[/] (sequential, sums to 1): {parts}")
        if structure:
            parts = ", ".join(f"{control} {_estimate(value)}" for control, value in structure.items())
            out.print(f"  relative to its controls (1: only the size of the error matters): {parts}")
    if summary.predicted_kl is not None:
        holds = "holds" if summary.is_valid else "does not hold: effects interact, or are not small"
        out.print(f"\nDelta2 predicts a KL of {_number(summary.predicted_kl)} for the plain quantizer; that {holds}.")
    _show_gradients(out, summary, None if show_all else _MAX_ROWS)
    for note in summary.notes:
        out.print(f"[dim]note: {_escape(note)}[/]")


def _show_arms(out: Console, summary: ReplaySummary) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=_escape(_LEGEND), caption_justify="left"
    )
    table.add_column("arm", no_wrap=True)
    for name in ("KL, nats/token", "gain \\[95 %]", "predicted", "entropy", "dW error"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in summary.arms:
        table.add_row(
            _escape(arm.arm),
            _number(arm.kl.value),
            _estimate(arm.gain),
            "-" if arm.predicted_gain is None else f"{arm.predicted_gain:.2f}",
            "-" if math.isnan(arm.entropy_shift) else f"{arm.entropy_shift:+.4f}",
            "-" if arm.gradient_error is None else _number(arm.gradient_error.value),
        )
    out.print(table)


def _show_gradients(out: Console, summary: ReplaySummary, limit: int | None) -> None:
    if summary.gradients:
        out.print("\n[bold]Weight gradients as it rounds now[/]: relative L2, cosine, log2 norm ratio, projection gain")
        for row in summary.gradients[:limit]:
            numbers = f"{row.relative_l2:.3f}  {row.cosine:.3f}  {row.log2_norm_ratio:+.3f}  {row.projection_gain:.3f}"
            out.print(f"  {numbers}  {_escape(row.module)}", soft_wrap=True)
    if summary.operands:
        method = summary.operands[0].method.replace("_", " ")
        out.print(f"\n[bold]Operands by what their error does to all weight gradients[/] (relative L2, by {method})")
        for operand in summary.operands[:limit]:
            out.print(f"  {operand.relative_l2:.4f}  {_escape(operand.module)} {operand.role}", soft_wrap=True)
    left = max((len(rows) - (limit or len(rows)) for rows in (summary.gradients, summary.operands)), default=0)
    if left > 0:
        out.print("[dim]more: --all[/]")


def _estimate(value: Estimate | None) -> str:
    """`0.64 [0.60, 0.68]`, the bracket kept from rich."""
    if value is None:
        return "-"
    if not (math.isfinite(value.low) and math.isfinite(value.high)):
        return f"{value.value:.2f}"
    return rf"{value.value:.2f} \[{value.low:.2f}, {value.high:.2f}]"


def _number(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "-"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))
