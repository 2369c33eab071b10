"""The page as text: what it says, what it never says, and that nothing in a trace can break out of it."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mxprobe.schema import PLAIN_WORDS, Verdict
from mxprobe_reports import Report, claims, depth, shell
from tests import report_frames

HOSTILE = [
    "</script><script>window.hit = 1</script>",
    "[bold]mlp[up]",
    "\"><img src=x onerror='window.hit = 1'>",
    "a" * 300,
    "слой.0.注意力.q_proj",
    "layer-0-注意力",
    "%{x}<b>&amp;$y$",
]


def page(**overrides: Any) -> str:
    return Report.of(report_frames.inputs(**overrides)).render(command_line="mxprobe report demo.mxprobe")


def text_of(html: str) -> str:
    """The body without scripts and tags."""
    body = html[html.index("<main") : html.index("</main>")]
    return re.sub(r"<[^>]+>", " ", body)


@pytest.fixture(scope="module")
def whole() -> str:
    return page()


def test_shell_is_one_html_document_that_may_not_reach_the_network(whole: str) -> None:
    assert whole.startswith('<!doctype html>\n<html lang="en">')
    assert "<title>demo.mxprobe · mxprobe report</title>" in whole
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', whole)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", whole, flags=re.S)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy[1]) == hashes
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=[\"']?(https?:)?//", whole)


def test_plotly_is_there_once(whole: str) -> None:
    assert whole.count("* plotly.js v") == 1
    assert len(whole) < 5.3e6


def test_order_answers_what_where_and_what_to_do(whole: str) -> None:
    order = [
        "verdict",
        "signals",
        "error",
        "help",
        "layer",
        "layers-card",
        "realised",
        "depth",
        "claims",
        "coverage",
        "quality",
        "methods",
    ]
    found = [whole.index(f'id="{name}"') for name in order]
    assert found == sorted(found)


def test_verdict_says_how_sure_and_what_would_change_it(whole: str) -> None:
    text = text_of(whole)
    for words in (
        PLAIN_WORDS[Verdict.ENABLE],
        "Enable outlier fallback",
        "0.97",
        "12 probed steps",
        "What would change this.",
        "A replay in which outlier fallback",
        "0.74 [0.68, 0.79]",
        "Snippet for TRL",
    ):
        assert words in text


def test_raw_scale_ratio_is_only_in_the_table_for_the_paper(whole: str) -> None:
    text = text_of(whole)
    assert "170.0 %" not in text
    assert "1.70" in text[text.index("Raw ratios") :]
    assert "1.70" not in text[: text.index("Raw ratios")]


def test_coverage_lists_what_was_not_seen_and_why(whole: str) -> None:
    text = text_of(whole)
    assert "95.9 %" in text
    assert "a fused head reads lm_head.weight directly" in text


def test_overhead_is_time_in_hooks_over_the_rest(whole: str) -> None:
    # 12 probed steps of 60 ms with 320 ms in hooks, 228 others of 60 ms with 0.02 ms.
    share = (12 * 320 + 228 * 0.02) / (240 * 60)
    assert f"{100 * share:.1f} %" in text_of(whole)


def test_numbers_say_measured_predicted_or_associated(whole: str) -> None:
    for card in re.findall(r'<section class="card[^>]*>.*?</section>', whole, flags=re.S):
        title = re.search(r"<h2>(.*?)</h2>", card, flags=re.S)
        if title and title[1] not in ("Data quality", "Events", "All signals", "Versions and command line"):
            assert 'class="basis' in card, title[1]


@pytest.mark.parametrize(("rule", "expected"), [("floor", True), ("even", True), ("oas", True), ("rceil", False)])
def test_rules_that_undershoot_the_ideal_scale_get_the_lemma_note(rule: str, expected: bool) -> None:
    rows = report_frames.tensors(report_frames.module_names(1), [1, 2])
    html = page(n_layers=1, tensors=rows.assign(rule=rule))
    assert (f"Rule {rule} allows scales below amax/6" in html) is expected


def test_hostile_names_are_text_everywhere() -> None:
    names = HOSTILE
    html = page(
        names=names,
        modules=report_frames.modules_table([*names, *(f"{name} (2)" for name in names)]).assign(status="not_called"),
        name=HOSTILE[0],
        problems=[HOSTILE[2]],
        events=report_frames.frame(
            "events", {"step": [1], "time_ns": [1], "kind": [HOSTILE[2]], "detail": [HOSTILE[0]]}
        ),
        signals=report_frames.signals(20).assign(raw_key=HOSTILE[0]),
        run={"target": {"cmdline": HOSTILE}, HOSTILE[0]: HOSTILE[2], "config": {HOSTILE[2]: HOSTILE[0]}},
    )
    scripts = re.findall(r"<script", html)
    assert len(scripts) == len(re.findall(r"<script", page())) == 3
    assert "<img" not in html.replace(shell.get_plotlyjs(), "")
    data = json.loads(html[html.index('id="data">') + 10 :].split("</script>")[0])
    assert set(data["modules"]["names"]) == set(names)
    assert len(set(data["modules"]["slugs"])) == len(names)


def test_embedded_json_cannot_end_its_element() -> None:
    embedded = shell.embed({"name": "</script><!-- &", "x": 1.5})
    assert "<" not in embedded
    assert json.loads(embedded) == {"name": "</script><!-- &", "x": 1.5}


def empty_frames() -> dict[str, Any]:
    tables = ("tensors", "outputs", "whatif", "signals", "events", "modules", "overhead")
    return {table: report_frames.frame(table, {}) for table in tables}


def test_empty_trace_gives_a_page_that_says_so() -> None:
    nothing = report_frames.recommendation([], verdict=Verdict.NOT_ENOUGH_EVIDENCE, n_steps=0)
    html = page(**empty_frames(), recommendation=nothing, run={}, problems=["The trace is empty: no table has a row."])
    text = text_of(html)
    for words in (
        "not enough evidence",
        "The trace is empty",
        "No operand was measured",
        "Not logged in this trace.",
        "No step was timed",
        "No correction is offered",
        "no steps",
    ):
        assert words in (text if words != "no steps" else html)
    assert "nan" not in text.lower().replace("finance", "")


def test_no_signals_is_said_beside_the_error() -> None:
    text = text_of(page(signals=report_frames.frame("signals", {})))
    assert text.count("Not logged in this trace.") == 3
    assert "No training metric was captured." in text
    assert "Worst operands" in text


def test_one_step_gives_a_page_and_a_warning() -> None:
    text = text_of(page(n_steps=20, every=20))
    assert "Only one step was probed" in text


def test_nan_laden_trace_gives_a_page_that_says_so() -> None:
    whole_run = report_frames.tables()
    tensors, outputs, signals = whole_run["tensors"], whole_run["outputs"], whole_run["signals"]
    floats = tensors.select_dtypes("float").columns
    tensors[floats] = np.nan
    outputs[["ref2", "realised2", "predicted2", "residual2"]] = np.nan
    signals["value"] = np.nan
    overhead = whole_run["overhead"].astype({"step_ns": float, "probe_ns": float})
    overhead[["step_ns", "probe_ns"]] = np.nan
    html = page(tensors=tensors, outputs=outputs, signals=signals, overhead=overhead)
    text = text_of(html)
    assert f"{len(tensors)} operand rows are left out: a sum in them is missing" in text
    assert "Every logged value is NaN or infinite." in text
    assert "no realised error is finite" in text
    assert "No step was timed" in text


def test_nan_in_a_few_rows_leaves_the_rest_on_the_page() -> None:
    rows = report_frames.tensors(report_frames.module_names(2), list(range(20, 241, 20)))
    rows.loc[::7, "sum_x2"] = np.nan
    report = Report.of(report_frames.inputs(tensors=rows))
    assert report.operands.n_bad_rows == len(rows[::7])
    assert np.isfinite(report.columns["nmse"]).all()


def test_downsampling_is_said_and_the_page_stays_small() -> None:
    report = Report.of(report_frames.inputs(n_layers=32, n_steps=2000, every=32))
    html = report.render()
    assert len(report.operands.totals) == 224 * 6
    assert report.summary()["n_displayed_steps"] < report.summary()["n_probed_steps"] == 62
    assert "For display, 62 probed steps are added up into" in html
    assert len(html) < 10e6


def test_long_signals_are_resampled_and_say_so() -> None:
    report = Report.of(report_frames.inputs(signals=report_frames.signals(9000)))
    reward = report.signals[0]
    assert len(reward.values) == 2000
    assert "9000 steps shown as 2000 means" in reward.detail


def test_mismatch_is_the_median_gap_over_modules_per_step() -> None:
    outputs = report_frames.frame(
        "outputs",
        {
            "step": [1, 1, 1, 1, 2],
            "module": ["a", "a", "b", "b", "a"],
            "phase": ["train", "rollout", "train", "rollout", "rollout"],
            "recipe_x": ["none"] * 5,
            "recipe_w": ["none"] * 5,
            "exact": [True] * 5,
            "ref2": [10.0] * 5,
            "realised2": [1.0, 3.0, 1.0, 2.0, 5.0],
            "predicted2": [0.0] * 5,
        },
    )
    mismatch = Report.of(report_frames.inputs(outputs=outputs)).signals[2]
    assert mismatch.steps.tolist() == [1]
    assert mismatch.values.tolist() == pytest.approx([0.15])


def test_summary_counts_what_the_page_shows() -> None:
    summary = Report.of(report_frames.inputs()).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["n_modules"], summary["n_operands"], summary["n_signals"]) == (14, 84, 4)
    assert summary["verdict"] == "enable"
    assert summary["problems"] == []


def test_negative_scale_share_is_no_scale_problem() -> None:
    rows: pd.DataFrame = report_frames.tensors(report_frames.module_names(1), [1])
    rows["out_grid2"] = 1.3 * rows["out_e2"]
    assert "no scale problem" in page(n_layers=1, tensors=rows)


def test_a_run_in_high_precision_gets_what_mxfp4_would_do_not_a_measurement() -> None:
    names = report_frames.module_names(2)
    html = page(recommendation=report_frames.recommendation(names, verdict=Verdict.NOTHING_QUANTIZED))
    assert "this is what mxfp4 rceil would do to these tensors" in html
    card = html[html.index("<h2>Where it hurts</h2>") :][:200]
    assert 'class="basis predicted"' in card


def test_evidence_under_its_threshold_is_no_failure() -> None:
    names = report_frames.module_names(2)
    told = report_frames.recommendation(names)
    quiet = replace(told, evidence=(replace(told.evidence[0], value=1e-4, holds=False), *told.evidence[1:]))
    html = page(recommendation=quiet)
    row = text_of(html)[text_of(html).index("Median mismatch over modules") :][:120]
    assert "not reached" in row
    assert "✗" not in html[html.index("<main") : html.index("</main>")]


def claims_text(**overrides: Any) -> str:
    html = page(**overrides)
    return text_of(html[html.index("<main") : html.index("</main>") + 7].replace("\n", " ")).split("three claims")[1]


def test_claims_are_read_off_this_run_and_say_what_is_missing() -> None:
    text = claims_text()
    assert "93.0 % is made on values rounded to zero" in text
    assert text.count("Not in this trace.") == 3
    assert "delta_sum_heuristic" in text
    scale, deadzone, grid = text.split("Scale bias")[1], text.split("The deadzone sets")[1], text.split("Grid noise")[1]
    assert "not what is seen here" in scale[:80]  # X along tokens loses most to its deadzone in these frames
    assert "scale is not the largest removable part" in scale
    calm = report_frames.tensors(report_frames.module_names(2), list(range(20, 241, 20)), outliers=False)
    scale = claims_text(tensors=calm).split("Scale bias")[1]
    assert "consistent with it" in scale[:80]
    assert "scale is the largest removable part" in scale
    assert "consistent with it" in deadzone[:80]
    assert "cannot be told from this trace" in grid[:80]


def test_deadzone_claim_follows_the_mismatch() -> None:
    told = report_frames.recommendation(report_frames.module_names(2))
    quiet = replace(told, evidence=(replace(told.evidence[0], value=1e-4, holds=False),))
    text = claims_text(recommendation=quiet).split("The deadzone sets")[1]
    assert "not what is seen here" in text[:80]
    assert "There is no mismatch to explain." in text


def test_gain_that_compounds_is_added_over_layers() -> None:
    report = Report.of(report_frames.inputs(n_layers=3))
    found = claims.compounding(report.operands)
    assert found is not None
    gain, delta, n_layers = found
    assert n_layers == 3
    assert gain == pytest.approx(3 * 2 * np.log2(0.99))
    assert delta == pytest.approx(3 * 2 * 0.5, abs=0.05)


def test_gradient_error_by_depth_is_the_median_over_a_layers_modules() -> None:
    report = Report.of(report_frames.inputs(n_layers=3))
    table = depth.by_depth(report.operands)
    assert list(table.index) == ["0", "1", "2"]
    rows = report_frames.tables(3)["tensors"]
    mine = rows[(rows["role"] == "g_wgrad") & rows["module"].astype(str).str.startswith("model.layers.1.")]
    sums = mine.groupby("module", observed=True)[["out_e2", "out_ref2"]].sum()
    assert table["g_wgrad"]["1"] == pytest.approx((sums["out_e2"] / sums["out_ref2"]).median())
    forward = report_frames.tables(1)["tensors"]
    forward = forward[forward["role"].isin(["x_fwd", "w_fwd"]).to_numpy()]
    assert "No operand of a weight-gradient GEMM" in page(n_layers=1, tensors=forward)


def test_a_rank_that_measured_nothing_is_named() -> None:
    frames = report_frames.tables()
    overhead = pd.concat([frames["overhead"].assign(rank=rank) for rank in (0, 1, 3)], ignore_index=True)
    problems = Report.of(report_frames.inputs(overhead=overhead)).problems
    assert any("No operand was measured on rank 1, 2, 3" in text for text in problems)


def test_ranks_are_kept_one_by_one_and_add_up() -> None:
    rows = report_frames.tables()["tensors"]
    two = pd.concat([rows, rows.assign(rank=1, out_e2=rows["out_e2"] * 3)], ignore_index=True)
    found = Report.of(report_frames.inputs(tensors=two)).operands
    assert [each.label for each in found.ranks] == ["rank 0", "rank 1"]
    first, second = (each.sums["out_e2"].sum() for each in found.ranks)
    assert second == pytest.approx(3 * first)
    assert found.totals["out_e2"].sum() == pytest.approx(first + second)


def test_more_ranks_than_the_page_holds_are_said() -> None:
    rows = report_frames.tensors(report_frames.module_names(30), [1])
    many = pd.concat([rows.assign(rank=rank) for rank in range(64)], ignore_index=True)
    report = Report.of(report_frames.inputs(n_layers=30, tensors=many))
    assert any("The page holds the first" in text and "of 64 ranks" in text for text in report.problems)
    assert len(report.render()) < 10e6


def test_split_is_shown_beside_gaussian_data() -> None:
    assert "Gaussian" in text_of(page()).split("Split of the output error")[1][:900]
