"""`mxprobe scan CHECKPOINT`: the analysis of weights, before there is a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxprobe.cli.common import escape, table
from mxprobe.errors import EXIT_TRACE
from mxprobe.numbers import fixed, number, percent

if TYPE_CHECKING:
    from rich.console import Console

    from mxprobe.scan.scanner import ScanResult
    from mxprobe.scan.settings import ScanSettings

_ARMS = {"q": "quantized", "qstar": "with ideal scales", "qstar_dz": "and no deadzone"}
_DIRECTIONS = {"w_fwd": "forward", "w_dgrad": "dgrad"}


@click.command("scan")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Trace to write; default NAME.mxprobe.")
@click.option("--format", default="mxfp4", show_default=True, metavar="NAME", help="Number format to quantize to.")
@click.option(
    "--rule", default="rceil", show_default=True, metavar="RULE", help="Scale rule of its power-of-two scales."
)
@click.option("--whatif", "whatifs", multiple=True, metavar="CORRECTION", help="Score these corrections. Repeatable.")
@click.option("--no-whatif", is_flag=True, help="Score no correction: the fastest scan.")
@click.option(
    "--whatif-elements",
    default=65_536,
    show_default=True,
    help="Elements of each weight and direction on which corrections are scored.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Scan only modules that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these out in place of the default. Repeatable.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Run these inputs through the model as well: lines of text, or token ids (.npy, .safetensors).",
)
@click.option(
    "--calibration-batches",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    help="Batches of at most four sequences, drawn evenly from the inputs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema mxprobe.scan/1) on standard output.")
@click.pass_context
def command(
    context: click.Context,
    checkpoint: Path,
    output: Path | None,
    whatifs: tuple[str, ...],
    no_whatif: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    calibration: Path | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Decompose the quantization error of the weights in CHECKPOINT, a safetensors file or a HuggingFace directory.

    No GPU and no run is needed; memory holds a part of one tensor. Writes a trace that `report` and `check` read.
    A scan that was stopped goes on when the same command is given again. Heads, embeddings and routers are left
    out unless --exclude says otherwise.

    With --calibration the model is built from its config and run on the CPU, in float32: activations, the errors of
    the products, and, for a causal language model, which operand moves its next-token distribution (Delta2) and by
    how much MXFP4 would. That needs transformers and memory for the model.

    Exits 3 when a file or a tensor could not be read; the rest is scanned.
    """
    from rich.console import Console

    from mxprobe.emulation.recipe import DEFAULT_EXCLUDE
    from mxprobe.scan.settings import ScanSettings
    from mxprobe.scan.summary import summarise
    from mxprobe.trace import open_trace
    from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS

    settings = ScanSettings(
        **chosen,
        whatifs=() if no_whatif else whatifs or DEFAULT_WHATIFS,
        include=include or ("*",),
        exclude=exclude or DEFAULT_EXCLUDE,
        calibration=str(calibration) if calibration else "",
    )
    status = Console(stderr=True)
    directory = output or Path(f"{checkpoint.resolve().name.removesuffix('.safetensors')}.mxprobe")
    result = _scan_with_progress(checkpoint, directory, settings, status)
    summary = summarise(open_trace(directory))
    if as_json:
        click.echo(json.dumps({"trace": str(directory), **summary}, indent=2, allow_nan=False))
    else:
        _show(summary, Console(highlight=False))
    resumed = f", {result.n_resumed} of them by an earlier scan" if result.n_resumed else ""
    status.print(f"{result.n_scanned} weights scanned{resumed}; trace {escape(str(directory))}")
    for problem in result.problems:
        status.print(f"[red]not read:[/] {escape(problem)}")
    if result.problems:
        context.exit(EXIT_TRACE)


def _scan_with_progress(checkpoint: Path, output: Path, settings: ScanSettings, status: Console) -> ScanResult:
    from rich.filesize import decimal
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from mxprobe.scan.scanner import scan

    columns = (
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=status) as progress:
        weights = progress.add_task("weights", total=None, amount="")
        inputs = progress.add_task("calibration", total=None, amount="", visible=False)

        def on_progress(now: Any) -> None:
            amount = f"{decimal(now.done_bytes)}/{decimal(now.total_bytes)}"
            speed = progress.tasks[weights].speed
            amount += f" {decimal(round(speed))}/s" if speed else ""
            label = escape(now.module) or "weights"
            progress.update(weights, total=now.total_bytes, completed=now.done_bytes, amount=amount, description=label)
            if now.n_batches:
                counted = f"{now.batch}/{now.n_batches} batches"
                progress.update(inputs, total=now.n_batches, completed=now.batch, amount=counted, visible=True)

        try:
            return scan(checkpoint, output, settings, on_progress=on_progress)
        except KeyboardInterrupt:
            status.print(f"stopped; the same command continues it ({escape(str(output))})")
            raise


def _show(summary: dict[str, Any], out: Console) -> None:
    directions = summary["directions"]
    named = [_DIRECTIONS[direction["role"]] for direction in directions]
    if directions:
        rows = [(label, *map(cell, directions)) for label, cell in _LINES.items()]
        _print_table(out, ["all weights", *named], rows)
        out.print("[dim]blocks run along in-features in the forward GEMM, along out-features in dgrad[/]\n")
    if any(direction["corrections"] for direction in directions):
        first = directions[0]["corrections"]
        tried = sorted(first, key=lambda name: first[name] if first[name] is not None else 2.0)
        rows = [(name, *(fixed(each["corrections"].get(name), 3) for each in directions)) for name in tried]
        _print_table(out, ["error left by", *named], rows)
        out.print()
    if summary["worst"]:
        rows = [
            (
                row["module"],
                row["role"],
                *(fixed(row[name]) for name in ("sqnr_db", "scale", "deadzone", "grid")),
                percent(row["zero_frac"]),
            )
            for row in summary["worst"]
        ]
        head = ["worst weights", "role", "SQNR dB", "scale", "deadzone", "grid", "zeros"]
        _print_table(out, head, rows, n_left=2)
        out.print()
    if summary["calibration"]:
        _show_calibration(summary["calibration"], summary["modules"].get("probed", 0), out)
    for name, count in summary["quantized"].items():
        counted = "1 weight is" if count == 1 else f"{count} weights are"
        out.print(f"{counted} quantized already, as {escape(name)}: not decomposed")
    if summary["nonfinite"]:
        out.print(f"[red]non-finite values[/] in {escape(', '.join(summary['nonfinite']))}")


def _show_calibration(found: dict[str, Any], n_weights: int, out: Console) -> None:
    inputs, activations = found["inputs"], found["activations"]
    said = f"{inputs['n_sequences']} of {inputs['n_available']} sequences, {inputs['n_tokens']:,} tokens"
    out.print(f"[bold]calibration[/]: {said}, through {escape(inputs['model'])}")
    if inputs["n_modules"] < n_weights:
        out.print(f"{inputs['n_modules']} of {n_weights} weights belong to Linears; the others stay in high precision")
    if activations:
        errors = activations["output_error"]
        both = " / ".join(percent(errors.get(role)) for role in ("x_fwd", "w_fwd"))
        rows = [(label, cell(activations)) for label, cell in _LINES.items()]
        rows.append(("error of the output, by X / by W", both))
        _print_table(out, ["all inputs of Linears", "sampled rows"], rows)
        out.print()
        rows = [(r["module"], percent(r["output_error"]), percent(r["zero_frac"])) for r in found["worst_outputs"]]
        _print_table(out, ["worst products", "error of the output by X", "zeros in X"], rows)
        out.print()
    if found["kl"] is None:
        out.print(f"{escape(inputs['model'])} has no next-token distribution: no Delta2, no KL")
        return
    rows = [(row["module"], row["role"], number(row["predicted_kl"])) for row in found["most_sensitive"]]
    _print_table(out, ["what moves the model", "role", "predicted KL, nats per token"], rows, n_left=2)
    arms = ", ".join(f"{_ARMS.get(arm, arm)} {number(kl)}" for arm, kl in found["kl"].items())
    out.print(f"KL of the model against itself as it is: {escape(arms)} nats per token")
    if not found["is_first_order"]:
        out.print("[yellow]the single effects do not add up to it[/]: read their order, not their size")
    out.print()


def _print_table(out: Console, head: list[str], rows: list[Any], *, n_left: int = 1) -> None:
    out.print(table(head, rows, right=range(n_left, len(head)), is_lined=False))


_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "elements": lambda d: f"{d['n']:,}",
    "SQNR (Gaussian)": lambda d: f"{fixed(d['sqnr_db'])} dB ({fixed(d['gaussian_sqnr_db'])})",
    "rounded to zero (Gaussian)": lambda d: f"{percent(d['zero_frac'])} ({percent(d['gaussian_zero_frac'])})",
    "clipped": lambda d: percent(d["saturated_frac"]),
    "scale / deadzone / grid": lambda d: " / ".join(fixed(d[n], 3) for n in ("scale", "deadzone", "grid")),
    "raw, as in the paper": lambda d: " / ".join(fixed(d[f"raw_{n}"], 3) for n in ("scale", "deadzone", "grid")),
    "cos(scale, grid)": lambda d: fixed(d["cos_scale_grid"], 3),
    "main component": lambda d: d["component"] or "-",
}
