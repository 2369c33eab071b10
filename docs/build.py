"""Make what docs show from the real thing: the help of each command, and the picture of the report.

    python docs/build.py                    the help in docs/commands/*.md
    python docs/build.py --picture TRACE    also docs/report.png, from `mxprobe report TRACE`
    python docs/build.py --check            exit 1 if a page is not what the code says

In a page only the part between the two markers is written; what people wrote around it stays.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import click

from mxprobe.cli import COMMANDS, main

HERE = Path(__file__).resolve().parent
PAGES = HERE / "commands"
BEGIN, END = "<!-- help: written by docs/build.py -->", "<!-- end of help -->"
WIDTH = 100
VIEWPORT = {"width": 1440, "height": 1000}


def build(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="TRACE")
    options = parser.parse_args(argv)
    stale = stale_pages()
    for path, text in stale.items():
        print(f"{'stale' if options.check else 'wrote'}: {path.relative_to(HERE.parent)}")
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if options.picture and not options.check:
        size = take_picture(options.picture, HERE / "report.png")
        print(f"wrote: docs/report.png ({size / 1000:.0f} kB)")
    return int(options.check and bool(stale))


def stale_pages(directory: Path = PAGES) -> dict[Path, str]:
    """Pages that differ from what the code says -> what they should hold."""
    wanted = {directory / f"{name}.md": _page(name, directory / f"{name}.md") for name in COMMANDS}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def _page(name: str, path: Path) -> str:
    block = f"{BEGIN}\n\n```\n{help_of(name)}\n```\n\n{END}"
    if not path.exists():
        return f"# `mxprobe {name}`\n\n{COMMANDS[name]}\n\n{block}\n"
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return f"{text.rstrip()}\n\n{block}\n"
    return f"{before}{block}{after}"


def help_of(name: str) -> str:
    """What `mxprobe NAME --help` prints at 100 columns, and the help of its sub-commands below."""
    settings = {**main.context_settings, "max_content_width": WIDTH, "terminal_width": WIDTH}
    root = click.Context(main, info_name="mxprobe", **settings)
    command = main.get_command(root, name)
    if command is None:
        raise LookupError(f"{name} is listed in mxprobe.cli.COMMANDS and cannot be loaded")
    return "\n\n\n".join(_help(command, name, root))


def _help(command: click.Command, name: str, parent: click.Context) -> list[str]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=WIDTH, terminal_width=WIDTH)
    found = [command.get_help(context)]
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            found += _help(child, each, context) if child else []
    return found


def take_picture(trace: Path, path: Path) -> int:
    """The first screen of the report in headless Chromium, light, 1440 x 1000. Returns the file's size in bytes."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page = Path(directory) / "report.html"
        main(["report", str(trace), "-o", str(page)], standalone_mode=False)
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_context(viewport=VIEWPORT, color_scheme="light").new_page()  # type: ignore[arg-type]
        tab.goto(page.as_uri())
        tab.wait_for_function("() => ['hurts', 'where'].every(n => document.getElementById('chart-' + n).data)")
        tab.wait_for_timeout(500)  # fonts and the last frame
        tab.screenshot(path=str(path))
        browser.close()
    return path.stat().st_size


if __name__ == "__main__":
    sys.exit(build())
