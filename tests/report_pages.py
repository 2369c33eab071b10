"""The report's page in headless Chromium, as tests open it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from mxprobe.cli import main
from mxprobe_reports import Report
from tests import report_frames, trace_files

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
AXE = "axe-core@4.14.1"
LAYER_CHARTS = ("output", "operand", "zeros", "delta")


class Watched:
    """A page that fails the test when it logs, throws, or asks for anything but its own file."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.route("**/*", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "trace"):
            self.complaints.append(message.text)

    def _on_request(self, route: Route) -> None:
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            self.requests.append(url)
            route.abort()

    def open(self, path: Path, fragment: str = "") -> "Watched":
        # The main thread draws what is on screen in the first frames; the file is local, so nothing else is awaited.
        self.page.goto(f"{path.as_uri()}{fragment}")
        self.page.wait_for_function("() => document.readyState === 'complete'")
        return self

    def show(self, selector: str) -> None:
        self.page.locator(selector).scroll_into_view_if_needed()

    def drawn(self, chart: str) -> list[dict[str, Any]]:
        """The traces of a chart once it is drawn, typed arrays as lists."""
        self.show(f"#chart-{chart}")
        self.page.wait_for_function("name => document.getElementById('chart-' + name).data", arg=chart)
        return self.page.evaluate(
            """name => document.getElementById('chart-' + name).data.map(t => ({
                type: t.type, name: t.name, n: (t.z || t.y || []).length, y: Array.from(t.y || t.z.flat())
            }))""",
            chart,
        )

    def check(self) -> None:
        assert self.complaints == []
        assert self.requests == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 1080})
    yield Watched(context.new_page())
    context.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    directory = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(directory), AXE]
    subprocess.run(command, check=True, timeout=300)
    return (directory / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def write(path: Path, **overrides: Any) -> Path:
    path.write_text(Report.of(report_frames.inputs(**overrides)).render(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks; on the second, outliers are gone."""
    frames = report_frames.tables()
    names = report_frames.module_names(2)
    calm = report_frames.tensors(names, list(range(20, 241, 20)), outliers=False).assign(rank=1)
    tensors = pd.concat([frames["tensors"], calm], ignore_index=True)
    return write(tmp_path_factory.mktemp("page") / "ranks.html", tensors=tensors)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mxprobe report A --against B`, B without outliers, through the command line."""
    directory = tmp_path_factory.mktemp("compared")
    names = report_frames.module_names(1)
    a, b = trace_files.frames(1, 240, 20), trace_files.frames(1, 240, 20)
    b["tensors"] = report_frames.tensors(names, list(range(20, 241, 20)), outliers=False)
    b["whatif"] = report_frames.whatif(b["tensors"])
    b["outputs"] = report_frames.outputs(names, list(range(20, 241, 20)), realised=0.01)
    for name, frames in (("a", a), ("b", b)):
        trace_files.write_trace(directory / f"{name}.mxprobe", frames)
    paths = [str(directory / f"{name}.mxprobe") for name in "ab"]
    result = CliRunner().invoke(main, ["report", paths[0], "--against", paths[1], "-o", str(directory / "page.html")])
    assert result.exit_code == 0, result.output
    return directory / "page.html"
