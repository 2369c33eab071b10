"""`mxprobe selftest`."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from mxprobe.errors import EXIT_ATTACH, EXIT_BREACHED


@click.command("selftest")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Measure on this machine, and its GPU, whether mxprobe is right and leaves a run as it was.

    Every backend against the float64 reference, then a real training job, attached and detached by every way in that
    is open here, against the same job left alone: bit for bit at every step. Takes one to two minutes; exit code 1 if
    anything is wrong, 4 if nothing can be attached. Paste the output in a bug report.
    """
    from mxprobe.attach.host_checks import check_host, ways_in
    from mxprobe.selftest.attached import check_attach, temporary
    from mxprobe.selftest.backends import check_backends

    started = time.monotonic()
    host = check_host()
    ways = ways_in(host)
    findings = [each for each in host if each.name in ("mxprobe", "python", "torch", "system", "listener", "ptrace")]
    shown = 0

    def show() -> None:
        nonlocal shown
        for finding in findings[shown:] if not as_json else []:
            click.echo(finding)
        shown = len(findings)

    show()
    findings += check_backends()
    show()
    if ways:
        with temporary() as directory:
            findings += check_attach(ways, Path(directory))
    show()
    wrong = [finding.name for finding in findings if finding.ok is False]
    seconds = time.monotonic() - started
    if as_json:
        answer = {"ok": not wrong, "seconds": seconds, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(answer, indent=2))
    else:
        verdict = f"WRONG: {', '.join(wrong)}" if wrong else "all that could be tested here is right"
        click.echo(f"\n{verdict} ({seconds:.0f} s)")
    if wrong and ways:
        ctx.exit(EXIT_BREACHED)
    if not ways:
        ctx.exit(EXIT_ATTACH)
