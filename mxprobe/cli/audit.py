"""`mxprobe audit TRACE` or `audit A B`: how each module is quantized on which side, and the known pitfalls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import escape, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mxprobe.audit import Audit, ModuleAudit, SideAudit

_NAMES_SHOWN = 4


@click.command("audit")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema mxprobe.audit/1) on standard output.")
@click.option("--all", "show_all", is_flag=True, help="One line per module, not per group of alike ones.")
def command(a: Path, b: Path | None, as_json: bool, show_all: bool) -> None:
    """Say which modules are quantized in training and in rollout, by which rule, and what is known to go wrong.

    With two traces, A is the trainer's and B the rollout's. All of it is told from values, not from configuration.
    """
    from mxprobe.audit import audit
    from mxprobe.trace import open_trace

    result = audit(open_trace(a), None if b is None else open_trace(b))
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        show(result, show_all=show_all)


def show(result: Audit, *, show_all: bool = False, console: Console | None = None) -> None:
    """Print an audit to standard output, or to the console given."""
    from rich.console import Console

    out = console or Console(highlight=False)
    out.print(_modules(result, show_all=show_all))
    if result.is_clean:
        out.print("[bold]No known pitfall found.[/]")
    for finding in result.findings:
        names = ", ".join(finding.modules[:_NAMES_SHOWN])
        more = f" and {len(finding.modules) - _NAMES_SHOWN} more" if len(finding.modules) > _NAMES_SHOWN else ""
        out.print(f"[bold]{escape(finding.pitfall.title)}[/]  [dim]{finding.pitfall.slug}[/]")
        out.print(f"  {escape(finding.detail)}")
        if names:
            out.print(f"  in {escape(names)}{more}")
        out.print(f"  [dim]what it does: {escape(finding.pitfall.symptom)}[/]\n")


def _modules(result: Audit, *, show_all: bool) -> Table:
    groups: dict[tuple[str, ...], list[str]] = {}
    for module in result.modules:
        key = (module.class_name, module.dtype, _words(module, module.train), _words(module, module.rollout))
        group = (*key, _lag(module.rollout), module.module if show_all else module.kind)
        groups.setdefault(group, []).append(module.module)
    rows = [
        (names[0] if len(names) == 1 else f"{len(names)} x {names[0].rpartition('.')[2]}", *cells)
        for (*cells, _), names in groups.items()
    ]
    return table(("module", "class", "dtype", "training", "rollout", "weights"), rows)


def _words(module: ModuleAudit, side: SideAudit | None) -> str:
    if side is not None:
        return side.words
    return module.status.replace("_", " ") if module.status != "probed" else "not seen"


def _lag(side: SideAudit | None) -> str:
    if side is None:
        return ""
    lag = side.weight_lag
    return "not known" if lag is None else "current" if lag == 0 else f"-{lag} steps"
