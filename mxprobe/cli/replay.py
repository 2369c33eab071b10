"""`mxprobe replay`: what the replayed microbatches of a trace say, each number with its interval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import escape, note, table
from mxprobe.errors import TraceError
from mxprobe.numbers import NOTHING, fixed, interval, number, signed
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
        note(problem)
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
            parts = ", ".join(f"{part} {escape(_estimate(value))}" for part, value in split.items())
            out.print(f"\n[bold]Split of the {name}[/] (sequential, sums to 1): {parts}")
        if structure:
            parts = ", ".join(f"{control} {escape(_estimate(value))}" for control, value in structure.items())
            out.print(f"  relative to its controls (1: only the size of the error matters): {parts}")
    if summary.predicted_kl is not None:
        holds = "holds" if summary.is_valid else "does not hold: effects interact, or are not small"
        out.print(f"\nDelta2 predicts a KL of {number(summary.predicted_kl)} for the plain quantizer; that {holds}.")
    _show_gradients(out, summary, None if show_all else _MAX_ROWS)
    for text in summary.notes:
        out.print(f"[dim]note: {escape(text)}[/]")


def _show_arms(out: Console, summary: ReplaySummary) -> None:
    head = ("arm", "KL, nats/token", "gain [95 %]", "predicted", "entropy", "dW error")
    rows = [
        (
            arm.arm,
            number(arm.kl.value),
            _estimate(arm.gain),
            fixed(arm.predicted_gain),
            signed(arm.entropy_shift),
            number(None if arm.gradient_error is None else arm.gradient_error.value),
        )
        for arm in summary.arms
    ]
    out.print(table(head, rows, right=range(1, 6), legend=_LEGEND))


def _show_gradients(out: Console, summary: ReplaySummary, limit: int | None) -> None:
    if summary.gradients:
        out.print("\n[bold]Weight gradients as it rounds now[/]: relative L2, cosine, log2 norm ratio, projection gain")
        for row in summary.gradients[:limit]:
            values = (row.relative_l2, row.cosine, row.log2_norm_ratio, row.projection_gain)
            numbers = "  ".join(f"{fixed(value, 3):>6}" for value in values)
            out.print(f"  {numbers}  {escape(row.module)}", soft_wrap=True)
    if summary.operands:
        method = summary.operands[0].method.replace("_", " ")
        out.print(f"\n[bold]Operands by what their error does to all weight gradients[/] (relative L2, by {method})")
        for operand in summary.operands[:limit]:
            out.print(f"  {fixed(operand.relative_l2, 4)}  {escape(operand.module)} {operand.role}", soft_wrap=True)
    left = max((len(rows) - (limit or len(rows)) for rows in (summary.gradients, summary.operands)), default=0)
    if left > 0:
        out.print("[dim]more: --all[/]")


def _estimate(value: Estimate | None) -> str:
    return NOTHING if value is None else interval(value.value, value.low, value.high, fixed)
