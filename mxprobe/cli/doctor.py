"""`mxprobe doctor`."""

import json
from dataclasses import asdict

import click

from mxprobe.errors import EXIT_ATTACH, UsageError


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--install-listener", is_flag=True, help="Let Pythons of this environment listen when MXPROBE_LISTEN=1.")
@click.option("--remove-listener", is_flag=True, help="Undo that.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, install_listener: bool, remove_listener: bool) -> None:
    """Say which ways of attaching work here, and why not; each is tried on a process of our own.

    Exit code 4 if none works. Paste the output in a bug report: it names paths and versions, nothing else.
    """
    from mxprobe.attach import startup_hook
    from mxprobe.attach.host_checks import check_host, ways_in

    if install_listener and remove_listener:
        raise UsageError("--install-listener and --remove-listener exclude each other")
    if install_listener:
        click.echo(f"installed {startup_hook.install()}; now start jobs with MXPROBE_LISTEN=1", err=True)
        return
    if remove_listener:
        removed = startup_hook.remove()
        click.echo(f"removed {removed}" if removed else "there was none", err=True)
        return
    findings = check_host()
    ways = ways_in(findings)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings], "ways_in": ways}, indent=2))
    else:
        for finding in findings:
            click.echo(finding)
            if finding.remedy:
                click.echo(f"{'':23}{finding.remedy}")
    if not ways:
        ctx.exit(EXIT_ATTACH)
