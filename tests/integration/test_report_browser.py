"""The page in headless Chromium: draws, follows the selection, asks nothing of the network, complains about nothing."""

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from mxprobe.cli import main
from mxprobe.schema import Verdict
from mxprobe_reports import Report
from tests import report_frames, trace_files
from tests.unit.test_report_page import HOSTILE, empty_frames

pytestmark = pytest.mark.browser

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


def selection(watched: Watched) -> str:
    return watched.page.locator("#layer-select option:checked").inner_text()


def test_every_chart_holds_data(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    names = watched.page.locator("[data-chart]").evaluate_all("nodes => nodes.map(n => n.dataset.chart)")
    assert len(names) == 4 + 2 + len(LAYER_CHARTS) + 2
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


STOPS = """() => Array.from(document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]'))
    .filter(node => node.checkVisibility() && !node.disabled && (node.type !== 'radio' || node.checked))"""
FOCUS = """() => {
    const node = document.activeElement;
    if (node === document.body || node === document.documentElement) return null;
    const style = getComputedStyle(node.type === 'radio' ? node.closest('label') : node);
    const seen = node.getBoundingClientRect();
    const name = node.id || node.getAttribute('href') || node.textContent.trim().slice(0, 40);
    const hasOutline = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
    const isShown = hasOutline && seen.bottom > 0 && seen.top < innerHeight;
    return [name, isShown, node.tagName === 'DIV' && !node.hasAttribute('tabindex')];
}"""


def test_tab_goes_from_the_skip_link_to_the_last_control_and_out(watched: Watched, whole: Path) -> None:
    """Every control once, in reading order, each with a visible focus, and no trap on the way."""
    watched.page.emulate_media(reduced_motion="reduce")  # else the page still scrolls when it is looked at
    watched.open(whole)
    keyboard = watched.page.keyboard
    keyboard.press("Tab")
    assert watched.page.evaluate(FOCUS)[0] == "#main"
    expected = watched.page.evaluate(
        f"() => ({STOPS})().map(n => n.id || n.getAttribute('href') || n.textContent.trim().slice(0, 40))"
    )
    visited: list[str] = []
    for _ in range(2 * len(expected)):
        stop = watched.page.evaluate(FOCUS)
        if stop is None:
            break
        name, is_shown, is_scroller = stop
        assert is_shown, name
        if not is_scroller:  # Chromium stops at what scrolls sideways and holds no control
            visited.append(name)
        keyboard.press("Tab")
    else:
        pytest.fail(f"the Tab key does not leave the page: {visited[-5:]}")
    assert visited == expected
    for name in (
        "step-from",
        "operand-filter",
        "chart-hurts",
        "measure",
        "layer-select",
        "layer-filter",
        "chart-depth",
    ):
        assert name in visited
    watched.check()


def test_keyboard_alone_moves_through_cells_operands_tables_and_saves_numbers(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    keyboard = watched.page.keyboard
    watched.drawn("hurts")
    watched.page.locator("#chart-hurts").focus()
    keyboard.press("Home")
    assert selection(watched) == "model.layers.0.self_attn.q_proj"
    keyboard.press("ArrowRight")
    keyboard.press("ArrowDown")
    assert selection(watched) == "model.layers.0.self_attn.k_proj"
    assert watched.page.locator("#operand-w_fwd").is_checked()
    shape = watched.page.evaluate("document.getElementById('chart-hurts').layout.shapes[0]")
    assert (shape["x0"], shape["y0"]) == (0.5, 0.5)
    keyboard.press("End")
    assert selection(watched) == "model.layers.1.mlp.down_proj"
    keyboard.press("ArrowRight")
    assert selection(watched) == "model.layers.1.mlp.down_proj"
    keyboard.press("Tab")
    keyboard.press("Enter")  # the chart's table
    watched.page.locator("details[data-table=hurts] tbody tr").nth(13).wait_for()
    keyboard.press("Tab")
    with watched.page.expect_download() as download:
        keyboard.press("Enter")
    assert download.value.suggested_filename == "hurts.csv"
    assert Path(download.value.path()).read_text(encoding="utf-8").count("\n") == 15
    watched.page.locator("#chart-where").focus()
    keyboard.press("Enter")
    assert watched.page.evaluate("document.activeElement.id") == "layer-select"
    watched.page.locator("#operand-w_fwd").focus()
    keyboard.press("ArrowLeft")
    assert watched.page.locator("#operand-x_fwd").is_checked()
    watched.page.locator("th[data-key=module] button").focus()
    keyboard.press("Enter")
    assert watched.page.locator("th[data-key=module]").get_attribute("aria-sort") == "ascending"
    assert watched.page.locator("#layers tr").first.inner_text().startswith("model.layers.0.self_attn.q_proj")
    watched.page.locator("a[href='#evidence']").focus()
    keyboard.press("Enter")
    watched.page.wait_for_function("() => document.getElementById('evidence').open")
    watched.check()


def test_operands_shown_reach_every_panel_or_the_panel_says_so(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    worst = watched.page.locator("#worst").inner_text()
    assert watched.page.locator(".scope:visible").count() == 0
    watched.page.locator("#operand-filter").select_option("dgrad")
    assert len(watched.drawn("hurts")[0]["y"]) == len(watched.drawn("where")[0]["y"]) == 2 * 14
    assert watched.page.locator("#operand-g_dgrad").is_checked()
    assert watched.page.locator("#operand-x_fwd").is_disabled()
    assert watched.page.locator("#worst").inner_text() != worst
    assert set(watched.page.locator("#worst td:nth-child(2)").all_inner_texts()) <= {"G dgrad", "W dgrad"}
    assert watched.page.locator("#split .total").count() == 2
    assert watched.page.locator("#layers-count").inner_text() == "20 of 28 operands"
    watched.show("#chart-depth")
    watched.page.wait_for_function("() => document.querySelector('#chart-depth .empty')")
    assert watched.page.locator("#verdict .scope").inner_text() == "of all operands"
    assert watched.page.locator("#help .scope").inner_text() == "of all operands"
    assert "show=dgrad" in watched.page.url
    watched.open(whole, "#layer=model-layers-0-mlp-up-proj&operand=x_fwd&steps=40-120&show=fwd")
    assert watched.page.locator("#operand-filter").input_value() == "fwd"
    assert watched.page.locator("#verdict .scope").inner_text() == "of all steps and operands"
    watched.check()


def test_numbers_over_a_range_are_sums_over_its_steps(watched: Watched, whole: Path) -> None:
    """The split, the worst operands, realised errors and the signals' own numbers, against the frames."""
    watched.open(whole)
    before = [watched.page.locator(name).inner_text() for name in ("[data-recent=reward]", "#split", "#keys")]
    watched.page.locator("#step-from").fill("100")
    watched.page.locator("#step-from").press("Enter")
    watched.page.wait_for_function("() => location.hash.includes('steps=100-240')")
    frames = report_frames.tables()
    rows = frames["tensors"][frames["tensors"]["step"] >= 100]
    forward = rows[rows["role"] == "x_fwd"]
    percent = 100 * forward["out_e2"].sum() / forward["out_ref2"].sum()
    assert watched.page.locator("#split .total").first.inner_text() == f"{percent:.1f} %"
    sums = rows.groupby(["module", "role"], observed=True)[["out_e2", "out_ref2"]].sum()
    worst = 100 * (sums["out_e2"] / sums["out_ref2"]).max()
    assert watched.page.locator("#worst td.num").first.inner_text() == f"{worst:.1f} %"
    module = watched.page.locator("#layer-select option:checked").inner_text()
    done = frames["outputs"]
    done = done[(done["step"] >= 100) & (done["module"] == module) & (done["phase"] == "rollout")]
    realised = 100 * done["realised2"].sum() / done["ref2"].sum()
    assert f"{realised:.1f} %" in watched.page.locator("#keys").inner_text()
    reward = frames["signals"]
    reward = reward[(reward["metric"] == "reward_mean") & (reward["step"] >= 100)].sort_values("step")["value"]
    lately = float(reward.iloc[-round(len(reward) / 10) :].mean())
    assert float(watched.page.locator("[data-recent=reward]").inner_text()) == pytest.approx(lately, abs=1e-3)
    watched.page.locator("#steps-all").click()
    after = [watched.page.locator(name).inner_text() for name in ("[data-recent=reward]", "#split", "#keys")]
    assert after == before
    watched.check()


def test_steps_shown_follow_the_bar_and_the_address(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    before = watched.drawn("hurts")
    keys = watched.page.locator("#keys").inner_text()
    watched.page.locator("#step-from").fill("100")
    watched.page.locator("#step-from").press("Enter")
    watched.page.wait_for_function("() => location.hash.includes('steps=100-240')")
    after = watched.drawn("hurts")
    assert after != before
    assert watched.page.locator("#keys").inner_text() != keys
    # One operand of the heatmap by hand: sums over the steps from 100 on, of rows 0, 84, 168, ... of the frame.
    rows = report_frames.tables()["tensors"]
    chosen = rows[(rows["step"] >= 100) & (rows["module"] == rows["module"][0]) & (rows["role"] == rows["role"][0])]
    expected = math.log10(chosen["out_e2"].sum() / chosen["out_ref2"].sum())
    assert after[0]["y"][0] == pytest.approx(expected, abs=1e-5)
    for chart in ("signal-reward", "output", "zeros"):
        watched.drawn(chart)
        range_ = watched.page.evaluate("n => document.getElementById('chart-' + n).layout.xaxis.range", chart)
        assert range_ == [100, 240], chart
    watched.page.locator("#steps-all").click()
    assert watched.drawn("hurts") == before
    assert "steps=" not in watched.page.url
    watched.open(whole, "#layer=model-layers-0-mlp-up-proj&operand=x_fwd&steps=40-120")
    assert watched.page.locator("#step-to").input_value() == "120"
    watched.check()


def test_steps_typed_wrong_are_put_right(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    watched.page.locator("#step-from").fill("900")
    watched.page.locator("#step-from").press("Enter")
    assert watched.page.locator("#step-from").input_value() == "240"
    watched.page.locator("#step-from").fill("")
    watched.page.locator("#step-from").press("Tab")
    assert watched.page.locator("#step-from").input_value() == "20"
    watched.check()


def test_a_rank_shows_its_own_numbers(watched: Watched, ranked: Path) -> None:
    watched.open(ranked)
    worst = [watched.drawn("hurts")[0]["y"]]
    for view in ("1", "2"):
        watched.page.locator("#rank-select").select_option(view)
        worst.append(watched.drawn("hurts")[0]["y"])
    both, first, second = (max(each) for each in worst)
    assert second < -1.5 < both < first
    assert "rank=2" in watched.page.url
    assert watched.drawn("output")
    watched.check()


def test_one_rank_needs_no_choice_of_rank(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    assert watched.page.locator("#rank-select").count() == 0


def test_events_and_change_points_are_on_the_signals(watched: Watched, tmp_path: Path) -> None:
    signals = report_frames.signals(240)
    late = (signals["metric"] == "reward_mean") & (signals["step"] > 120)
    noise = np.random.default_rng(5).normal(0.5, 0.03, len(signals))
    signals["value"] = np.where(signals["metric"] == "reward_mean", noise + 0.4 * late, signals["value"])
    watched.open(write(tmp_path / "steps.html", signals=signals))
    watched.drawn("signal-reward")
    marks = watched.page.evaluate(
        "document.getElementById('chart-signal-reward').layout.annotations.map(a => a.hovertext)"
    )
    assert marks[:2] == ["attached at step 3: 14 modules", "detached at step 240"]
    assert marks[2].startswith("step at 121, p ")
    assert marks[2].endswith("associated")
    card = watched.page.locator("#signals .card").first.inner_text()
    assert "associated" in card
    assert "no trend; step at 121: 0.495 to 0.903" in card
    watched.check()


def test_a_second_run_is_laid_over_every_chart(watched: Watched, compared: Path) -> None:
    watched.open(compared)
    assert watched.page.locator("#against .headline").inner_text()
    names = {chart: [trace["name"] for trace in watched.drawn(chart)] for chart in ("signal-reward", *LAYER_CHARTS)}
    assert "B" in names["signal-reward"]
    assert "total of B" in names["output"]
    assert "total of B" in names["operand"]
    assert "zeroed in B" in names["zeros"]
    watched.page.locator("#measure").select_option("b_over_a")
    watched.page.wait_for_timeout(100)
    ratios = watched.drawn("where")[0]["y"]
    # 0.013 / 0.6 at the inputs behind a norm, about 1 elsewhere.
    assert min(ratios) == pytest.approx(math.log10(0.013 / 0.6), abs=0.15)
    assert sum(abs(ratio) < 0.1 for ratio in ratios) > len(ratios) / 2
    watched.check()


def test_gaussian_band_lies_behind_the_levels(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    for chart, low, high in (("output", 0.0133, 0.0140), ("operand", 0.0133, 0.0140), ("zeros", 0.107, 0.117)):
        watched.drawn(chart)
        [band] = watched.page.evaluate("n => document.getElementById('chart-' + n).layout.shapes", chart)
        assert band["y0"] == pytest.approx(low, rel=0.02), chart
        assert band["y1"] == pytest.approx(high, rel=0.02), chart
    assert "Gaussian" in watched.page.locator(".split").inner_text()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    directory = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(directory), AXE]
    subprocess.run(command, check=True, timeout=300)
    return (directory / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["whole", "compared", "ranked", "empty"])
def test_axe_finds_no_serious_violation(
    browser: Browser, axe: str, request: pytest.FixtureRequest, tmp_path: Path, kind: str, scheme: Any
) -> None:
    if kind == "empty":
        little = report_frames.recommendation([], verdict=Verdict.NOT_ENOUGH_EVIDENCE, n_steps=0)
        path = write(tmp_path / "empty.html", **empty_frames(), recommendation=little, run={})
    else:
        path = request.getfixturevalue(kind)
    context = browser.new_context(viewport={"width": 1280, "height": 1080}, color_scheme=scheme, bypass_csp=True)
    watched = Watched(context.new_page()).open(path)
    watched.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for name in watched.page.locator("[data-chart]").evaluate_all("nodes => nodes.map(n => n.dataset.chart)"):
        watched.show(f"#chart-{name}")
    watched.page.wait_for_timeout(300)
    watched.page.evaluate(axe)
    result = watched.page.evaluate("axe.run(document)")
    assert "color-contrast" in {each["id"] for each in result["passes"]}  # it looked
    found = result["violations"]
    grave = [
        f"{each['id']}: {each['help']} {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert grave == [], json.dumps(grave, indent=1)
    context.close()


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
