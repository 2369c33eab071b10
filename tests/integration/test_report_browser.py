"""The page in headless Chromium: draws, fits, asks nothing of the network, complains about nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from mxprobe.schema import Verdict
from tests import report_frames
from tests.report_pages import LAYER_CHARTS, Watched, write
from tests.unit.test_report_page import HOSTILE, empty_frames

pytestmark = pytest.mark.browser


def test_every_chart_holds_data(watched: Watched, whole: Path) -> None:
    watched.open(whole)
    names = watched.page.locator("[data-chart]").evaluate_all("nodes => nodes.map(n => n.dataset.chart)")
    assert len(names) == 4 + 2 + len(LAYER_CHARTS) + 2
    for name in names:
        traces = watched.drawn(name)
        assert traces, name
        assert any(isinstance(v, (int, float)) for trace in traces for v in trace["y"]), name
    watched.check()


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
