"""The page in headless Chromium: draws, follows the selection, asks nothing of the network, complains about nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from mxprobe.schema import Verdict
from mxprobe_reports import Report
from tests import report_frames
from tests.unit.test_report_page import HOSTILE, empty_frames

pytestmark = pytest.mark.browser

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
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


def write(path: Path, **overrides: Any) -> Path:
    path.write_text(Report.of(report_frames.inputs(**overrides)).render(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "report.html")


def selection(watched: Watched) -> str:
    return watched.page.locator("#layer-select option:checked").inner_text()


def test_every_chart_holds_data(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    names = watched.page.locator("[data-chart]").evaluate_all("nodes => nodes.map(n => n.dataset.chart)")
    assert len(names) == 4 + 2 + len(LAYER_CHARTS) + 1
    for name in names:
        traces = watched.drawn(name)
        assert traces, name
        assert any(isinstance(v, (int, float)) for trace in traces for v in trace["y"]), name
    watched.check()


def test_selecting_a_layer_updates_every_panel_and_the_address(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    before = {name: watched.drawn(name) for name in LAYER_CHARTS}
    keys = watched.page.locator("#keys").inner_text()
    watched.page.locator("#layer-select").select_option(label="model.layers.1.mlp.down_proj")
    watched.page.locator("#operand-w_dgrad").check()
    for name in LAYER_CHARTS:
        assert watched.drawn(name) != before[name], name
    assert watched.page.locator("#keys").inner_text() != keys
    assert watched.page.url.endswith("#layer=model-layers-1-mlp-down-proj&operand=w_dgrad")
    assert watched.page.locator("#whatifs tr").count() == 2
    watched.check()


def test_address_restores_layer_and_operand_and_shows_the_panel(watched: Watched, whole: Path) -> None:
    watched.open(whole, "#layer=model-layers-0-self-attn-k-proj&operand=g_dgrad")
    assert selection(watched) == "model.layers.0.self_attn.k_proj"
    assert watched.page.locator("#operand-g_dgrad").is_checked()
    watched.page.wait_for_function("() => document.getElementById('layer').getBoundingClientRect().top < innerHeight")
    watched.page.evaluate("location.hash = '#layer=model-layers-1-mlp-up-proj&operand=x_fwd'")
    watched.page.wait_for_function("() => document.querySelector('#layer-select').value === '12'")
    watched.open(whole, "#layer=no-such-layer")
    assert selection(watched)
    watched.check()


def test_clicking_a_cell_of_the_heatmap_selects_it(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    watched.drawn("hurts")
    box = watched.page.locator("#chart-hurts .nsewdrag").bounding_box()
    assert box is not None
    # Column 9 of 14, row 1 of 6: v_proj of layer 1, weights.
    watched.page.mouse.click(box["x"] + box["width"] * 9.5 / 14, box["y"] + box["height"] * 1.5 / 6)
    watched.page.wait_for_function("() => document.querySelector('#layer-select').value === '9'")
    assert selection(watched) == "model.layers.1.self_attn.v_proj"
    assert watched.page.locator("#operand-w_fwd").is_checked()
    watched.check()


def test_keyboard_alone_reaches_layer_operand_and_sorting(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    first = selection(watched)
    watched.page.locator("#layer-next").focus()
    watched.page.keyboard.press("Enter")
    second = selection(watched)
    assert first != second
    watched.page.locator("#operand-x_fwd").focus()
    watched.page.keyboard.press("ArrowRight")
    assert watched.page.locator("#operand-w_fwd").is_checked()
    watched.page.locator("th[data-key=module] button").focus()
    watched.page.keyboard.press("Enter")
    assert watched.page.locator("th[data-key=module]").get_attribute("aria-sort") == "ascending"
    assert watched.page.locator("#layers tr").first.inner_text().startswith("model.layers.0.self_attn.q_proj")
    watched.check()


def test_every_control_is_reached_by_tab(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    reached: set[str] = set()
    for _ in range(150):
        watched.page.keyboard.press("Tab")
        reached.add(watched.page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"measure", "layer-select", "layer-previous", "layer-next", "layer-filter", "operand-filter"} <= reached
    assert "SUMMARY" in reached


def test_table_of_layers_sorts_and_filters(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    rows = watched.page.locator("#layers tr")
    assert rows.count() == 20
    watched.page.locator("#layers-more").click()
    assert rows.count() == 84
    watched.page.locator("#layer-filter").fill("1.mlp.down")
    assert rows.count() == 6
    watched.page.locator("#operand-filter").select_option("w_fwd")
    assert rows.count() == 1
    assert watched.page.locator("#layers-count").inner_text() == "1 operands"
    watched.check()


def test_each_chart_has_its_table_and_csv(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    for details in watched.page.locator("details[data-table]").all():
        details.locator("summary").click()
        details.locator("tbody tr").first.wait_for()
    with watched.page.expect_download() as download:
        watched.page.locator("details[data-table=hurts] button").click()
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith('"module","X fwd"')
    assert len(lines) == 1 + 14
    watched.check()


def test_measure_of_the_second_heatmap_can_be_chosen(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    before = watched.drawn("where")
    watched.page.locator("#measure").select_option("nmse_ratio")
    watched.page.wait_for_timeout(100)
    assert watched.drawn("where") != before
    assert "Gaussian" in watched.page.locator("#measure-help").inner_text()
    watched.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 1920])
def test_first_screen_says_what_where_and_what_to_do(browser: Browser, whole: Path, width: int, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": width, "height": 1080}, color_scheme=scheme)
    watched = Watched(context.new_page()).open(whole)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("#verdict h1", "#signals", "#error", "#help tbody tr.named"):
        box = watched.page.locator(selector).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 1080, selector
    background = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 246, 244)", "dark": "rgb(18, 21, 24)"}[scheme]
    watched.check()
    context.close()


def test_colours_of_charts_follow_the_system_setting(watched: Watched, whole: Path) -> None:
    watched.page.emulate_media(color_scheme="light")
    watched.open(whole)
    watched.drawn("hurts")
    color = "document.getElementById('chart-hurts').layout.shapes[0].line.color"
    assert watched.page.evaluate(color) == "#1b1f24"
    watched.page.emulate_media(color_scheme="dark")
    watched.page.wait_for_function(f"() => {color} === '#e8eaec'")
    watched.check()


def test_hostile_names_are_shown_as_they_are(watched: Watched, tmp_path: Path) -> None:
    watched.open(write(tmp_path / "hostile.html", names=HOSTILE, name=HOSTILE[0], problems=[HOSTILE[2]]))
    assert watched.page.evaluate("window.hit") is None
    assert watched.page.locator("main img").count() == 0
    options = watched.page.locator("#layer-select option").all_inner_texts()
    assert sorted(options) == sorted(HOSTILE)
    for chart in ("hurts", "where", "realised", *LAYER_CHARTS):
        watched.drawn(chart)
    for i in range(len(HOSTILE)):
        watched.page.locator("#layer-select").select_option(str(i))
    ticks = watched.page.locator("#chart-hurts .xtick text").all_inner_texts()
    assert len(ticks) == len(HOSTILE)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 1280
    watched.check()


def test_hover_text_is_the_name_and_not_markup(watched: Watched, tmp_path: Path) -> None:
    name = "<b>x</b> %{z} &lt; </script>"
    watched.open(write(tmp_path / "hover.html", names=[name]))
    watched.drawn("hurts")
    box = watched.page.locator("#chart-hurts .nsewdrag").bounding_box()
    assert box is not None
    watched.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    hover = watched.page.locator("#chart-hurts .hoverlayer .nums")
    hover.wait_for()
    assert name in hover.text_content()
    watched.check()


def test_pages_with_little_in_them_work(watched: Watched, tmp_path: Path) -> None:
    little = report_frames.recommendation([], verdict=Verdict.NOT_ENOUGH_EVIDENCE, n_steps=0)
    empty = {**empty_frames(), "recommendation": little, "run": {}}
    outputs_only = {**empty, "outputs": report_frames.outputs(report_frames.module_names(1), [1, 2])}
    for i, overrides in enumerate((empty, outputs_only, {"n_steps": 20, "every": 20})):
        watched.open(write(tmp_path / f"{i}.html", **overrides))
        assert watched.page.locator("#verdict h1").inner_text()
    watched.open(write(tmp_path / "outputs.html", **outputs_only))
    assert watched.drawn("realised")
    watched.check()


def test_a_large_run_is_interactive_within_six_seconds(watched: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "large.html", n_layers=32, n_steps=2000, every=32)
    watched.open(path)
    watched.drawn("where")
    ready_ms = watched.page.evaluate("performance.now()")
    assert ready_ms < 6000
    watched.page.locator("#layer-select").select_option(label="model.layers.31.mlp.down_proj")
    assert watched.drawn("output")
    watched.check()


def test_print_shows_the_verdict_and_no_navigation(watched: Watched, whole: Path) -> None:
    watched.page.emulate_media(color_scheme="dark")
    watched.open(whole)
    watched.page.emulate_media(media="print", color_scheme="dark")
    assert not watched.page.locator(".top nav").is_visible()
    assert watched.page.locator("#verdict h1").is_visible()
    assert watched.page.pdf(format="A4")[:5] == b"%PDF-"
    watched.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    widths = watched.page.locator("[data-chart] .main-svg").evaluate_all("nodes => nodes.map(n => n.clientWidth)")
    assert len(widths) >= 11
    assert max(widths) <= 700
    assert watched.page.evaluate("document.getElementById('chart-hurts').layout.font.color") == "#4c545d"
    watched.page.emulate_media(media="screen")
    watched.page.evaluate("dispatchEvent(new Event('afterprint'))")
    watched.page.wait_for_function("() => document.querySelector('#chart-hurts .main-svg').clientWidth > 500")
    watched.check()
