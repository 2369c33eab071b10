"""The page of `mxprobe compare -o` in headless Chromium."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser

from mxprobe.cli import main
from tests.hostile import MODULES, hostile
from tests.report_pages import Watched
from tests.unit.test_compare import recipe, run, signal

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs with hostile names, B with outlier fallback; through the command line."""
    directory = tmp_path_factory.mktemp("compared")
    change = (hostile, recipe("mxfp4+of:0.5", 0.25), signal("reward_mean", 0.4))
    a = run(directory / "a<i>.mxprobe", hostile)
    b = run(directory / "b.mxprobe", *change, config={MODULES[2]: MODULES[0]})
    result = CliRunner().invoke(main, ["compare", str(a), str(b), "-o", str(directory / "page.html")])
    assert result.exit_code == 0, result.output
    return directory / "page.html"


def test_every_chart_holds_both_runs(watched: Watched, page: Path) -> None:
    watched.open(page)
    names = watched.page.locator("[data-chart]").evaluate_all("nodes => nodes.map(n => n.dataset.chart)")
    assert len(names) >= 3 + 4
    for name in names:
        traces = watched.drawn(name)
        assert traces[-1]["name"] == "B", name
        assert all(any(isinstance(v, (int, float)) for v in trace["y"]) for trace in traces), name
    watched.check()


def test_its_tables_hold_both_runs_and_names_are_text(watched: Watched, page: Path) -> None:
    watched.open(page)
    watched.page.locator("#signals details[data-table] > summary").first.click()
    table = watched.page.locator("#signals details[data-table]").first.locator("table")
    table.locator("th").first.wait_for()  # drawn when it is opened
    assert table.locator("th").all_inner_texts() == ["step", "reward mean", "B, as drawn"]
    assert table.locator("tbody tr").count() == 120
    cells = table.locator("tbody tr").last.locator("td").all_inner_texts()
    assert float(cells[2]) - float(cells[1]) == pytest.approx(0.4, abs=0.1)
    watched.page.locator("#settings details > summary").click()
    assert MODULES[3] in watched.page.locator("#settings").inner_text()
    assert "a<i>.mxprobe" in watched.page.locator("#against").inner_text()
    assert watched.page.evaluate("window.hit") is None
    assert watched.page.locator("main img, main i, main script").count() == 0
    watched.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser: Browser, axe: str, page: Path, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 1080}, color_scheme=scheme, bypass_csp=True)
    opened = Watched(context.new_page()).open(page)
    opened.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for name in opened.page.locator("[data-chart]").evaluate_all("nodes => nodes.map(n => n.dataset.chart)"):
        opened.drawn(name)
    opened.page.add_script_tag(content=axe)
    found = opened.page.evaluate("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))")
    assert [each for each in found if each[0] in ("serious", "critical")] == []
    width = opened.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 1280
    context.close()
