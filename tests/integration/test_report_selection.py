"""The page in headless Chromium follows its selection (layer, operand, steps, rank) by mouse, keyboard and address."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests import report_frames
from tests.report_pages import LAYER_CHARTS, Watched

pytestmark = pytest.mark.browser


def selection(watched: Watched) -> str:
    return watched.page.locator("#layer-select option:checked").inner_text()


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
