"""`mxprobe check TRACE`: the gate for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxprobe.cli.common import engine_option, note
from mxprobe.errors import EXIT_BREACHED, UsageError
from mxprobe.printable import printable

if TYPE_CHECKING:
    from mxprobe.checks import CheckResult, Finding

_SHOWN_PER_LIMIT = 10


@click.command("check")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Limits from this file instead of the nearest mxprobe.toml or pyproject.toml.",
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set a limit, e.g. max_nmse=0.02.")
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print every finding as JSON.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write JUnit XML to this file, too.")
@click.pass_context
def command(
    context: click.Context,
    trace: Path,
    config: Path | None,
    assignments: tuple[str, ...],
    engine: str,
    as_json: bool,
    junit: Path | None,
) -> None:
    """Hold TRACE against the limits in [check]; exit 0 when all hold, 1 when one is breached or cannot be checked.

    Exits 2 when no limit is set or a key is unknown, 3 when there is no readable trace.
    """
    from mxprobe.checks import check_trace, to_junit
    from mxprobe.config import load
    from mxprobe.trace import open_trace

    settings = load(config=config, assignments=assignments, sections=("verdict", "check"))
    opened = open_trace(trace, engine=engine)
    result = check_trace(opened, settings)
    if junit is not None:
        try:
            junit.write_text(to_junit(result, str(trace)), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {junit}: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        _print(result)
    if not result.passed:
        context.exit(EXIT_BREACHED)


def _print(result: CheckResult) -> None:
    """Print a line per limit and the worst offenders below it; notes go to standard error."""
    from mxprobe.checks.junit import sentence

    for problem in result.problems:
        note(problem)
    for limit in dict.fromkeys(finding.limit for finding in result.findings):
        findings = [finding for finding in result.findings if finding.limit == limit]
        failures = [finding for finding in findings if finding in result.failures]
        if failures:
            several = f"  {len(failures)} of {len(findings)} beyond it" if len(findings) > 1 else ""
            click.echo(f"FAIL  {limit}{several}")
        else:
            click.echo(f"ok    {limit}  {_worst(findings)}")
        failures.sort(key=lambda finding: -finding.value if isinstance(finding.value, float) else 0.0)
        for finding in failures[:_SHOWN_PER_LIMIT]:
            click.echo(f"        {printable(sentence(finding).partition(': ')[2])}")
        if len(failures) > _SHOWN_PER_LIMIT:
            click.echo(f"        and {len(failures) - _SHOWN_PER_LIMIT} more; --json lists all")
    click.echo("all limits hold" if result.passed else f"{len(result.failures)} breached or not checked")


def _worst(findings: list[Finding]) -> str:
    """Return the worst value and the limit it was held against, for example `0.0123 (limit 0.03)`."""
    numeric = [(each.value, each.bound) for each in findings if isinstance(each.value, float)]
    if not numeric:
        return str(findings[0].value)
    is_floor = findings[0].limit.startswith("min_")
    value, bound = max(numeric, key=lambda pair: -pair[0] if is_floor else pair[0])
    return f"{'worst of ' + str(len(numeric)) + ': ' if len(numeric) > 1 else ''}{value:.4g} (limit {bound:g})"
