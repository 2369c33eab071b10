"""`mxprobe config show`: effective settings and where each came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mxprobe.config import Settings, Value


@click.group("config")
def command() -> None:
    """Look at the settings: mxprobe.toml, [tool.mxprobe] of pyproject.toml, MXPROBE_* and the defaults."""


@command.command("show")
@click.argument("section", required=False)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="This file instead of the nearest one.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="As on the command line of `check`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def show(section: str | None, config: Path | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Print each setting, its value and its source; of one SECTION (attach, verdict, check) or of all."""
    from mxprobe.config import SECTIONS, load
    from mxprobe.errors import UsageError

    if section is not None and section not in SECTIONS:
        raise UsageError(f"there is no section {section!r}", remedy=f"use one of: {', '.join(SECTIONS)}")
    settings = load(config=config, assignments=assignments, sections=(section,) if section else SECTIONS)
    if as_json:
        click.echo(json.dumps(_to_json(settings), indent=2))
    else:
        _print(settings)


def _to_json(settings: Settings) -> dict[str, object]:
    return {
        "schema": "mxprobe.config/1",
        "files": [str(path) for path in settings.files],
        "settings": [
            {
                "key": each.key.path,
                "value": list(each.value) if isinstance(each.value, tuple) else each.value,
                "source": each.source,
                "variable": each.key.variable,
                "help": each.key.help,
            }
            for each in settings.settings
        ],
        "layers": [{"glob": each.glob, "limits": each.limits, "source": each.source} for each in settings.overrides],
    }


def _print(settings: Settings) -> None:
    """Print lines of fixed columns, so that they can be grepped; paths stay whole."""
    files = ", ".join(str(path) for path in settings.files) or "none found from here upwards"
    click.echo(f"files: {files}", err=True)
    rows = [(each.key.path, _text(each.value), each.source) for each in settings.settings]
    rows += [
        (f"check.layers[{override.glob}].{name}", _text(limit), override.source)
        for override in settings.overrides
        for name, limit in override.limits.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for path, value, source in rows:
        click.echo(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {source}")


def _text(value: Value) -> str:
    if value is None:
        return "not set"
    return ", ".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
