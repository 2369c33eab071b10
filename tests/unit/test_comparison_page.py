"""The page of a comparison: what it says, what it draws, and that names stay text."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from click.testing import CliRunner

from mxprobe.cli import main
from mxprobe.comparison import Comparison, compare
from mxprobe.trace import Trace, open_trace
from mxprobe_reports import ComparisonPage
from mxprobe_reports.comparison_page import ERRORS_DRAWN
from tests.hostile import MODULES, hostile
from tests.unit.test_compare import first_run, recipe, run, signal


def unpacked(packed: dict[str, Any]) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(packed["f32"]), dtype="<f4")


def data_of(html: str) -> dict[str, Any]:
    return json.loads(html[html.index('id="data">') + 10 :].split("</script>")[0])


def corrected(tmp_path: Path, **facts: Any) -> tuple[Trace, Trace, Comparison]:
    b = run(tmp_path / "b.mxprobe", recipe("mxfp4+of:0.5", 0.25), signal("reward_mean", 0.4), **facts)
    traces = open_trace(first_run()), open_trace(b)
    return *traces, compare(*traces)


def test_both_runs_are_drawn_with_their_own_values(tmp_path: Path) -> None:
    a, b, comparison = corrected(tmp_path)
    html = ComparisonPage.of(a, b, comparison).render()
    drawn = data_of(html)["signals"]
    assert len(drawn) == len(comparison.signals) + min(ERRORS_DRAWN, sum(each.is_clear for each in comparison.errors))
    assert len(re.findall(r'data-chart="signal-', html)) == len(drawn)
    reward = next(each for each in drawn if each["title"] == "reward mean")
    rows = a.signals()
    rows = rows[rows["metric"] == "reward_mean"]
    np.testing.assert_allclose(unpacked(reward["values"]), rows["value"], rtol=1e-6)
    assert (unpacked(reward["against"]["values"]) - unpacked(reward["values"])).mean() == pytest.approx(0.4, abs=0.05)
    error = drawn[-1]
    assert error["title"].startswith("realised output error, ")
    ratio = unpacked(error["against"]["values"]) / unpacked(error["values"])
    assert ratio.mean() == pytest.approx(0.25, rel=0.1)


def test_headline_prediction_and_settings_are_in_words_without_javascript(tmp_path: Path) -> None:
    a, b, comparison = corrected(tmp_path, config={"every": 20})
    html = ComparisonPage.of(a, b, comparison).render(command_line="mxprobe compare a b")
    body = html[html.index("<main") : html.index("</main>")]
    assert "Outlier fallback (alpha 0.5) helped as predicted." in body
    assert "config.every" in body
    assert "mxprobe compare a b" in body
    assert body.index('class="headline"') < body.index('id="signals"') < body.index('id="error"')
    assert len(re.findall(r"<tr>", body)) > len(comparison.errors)


def test_the_same_run_twice_draws_what_the_layers_realised(tmp_path: Path) -> None:
    b = run(tmp_path / "b.mxprobe")
    traces = open_trace(first_run()), open_trace(b)
    page = ComparisonPage.of(*traces, compare(*traces))
    assert "none changed clearly" in page.render()
    assert page.errors
    assert all(each.a.title.startswith("realised") for each in page.errors)


def test_runs_without_common_steps_or_metrics(tmp_path: Path) -> None:
    def later(tables: dict[str, pd.DataFrame]) -> None:
        for name in ("tensors", "outputs", "whatif", "signals", "overhead"):
            tables[name]["step"] += 5_000
        tables["signals"] = tables["signals"].iloc[:0]

    traces = open_trace(first_run()), open_trace(run(tmp_path / "b.mxprobe", later))
    html = ComparisonPage.of(*traces, compare(*traces)).render()
    assert "each over its own steps, A 1 to 120, B 5010 to 5120" in html
    assert min(unpacked(data_of(html)["signals"][0]["against"]["steps"])) == 5010


def test_long_runs_are_drawn_as_means(tmp_path: Path) -> None:
    from mxprobe_reports.comparison_page import _curve  # pyright: ignore[reportPrivateUsage]

    values = np.random.default_rng(0).normal(size=4999)
    curve = _curve("m0", "x", pd.Series(values, index=np.arange(1, 5000)), from_zero=False)
    assert len(curve.values) == len(curve.steps) == 2000
    assert curve.steps[:3].tolist() == [1, 4, 6]
    np.testing.assert_allclose(curve.values[:2], [values[:3].mean(), values[3:5].mean()])


def test_hostile_names_are_text(tmp_path: Path) -> None:
    a = open_trace(run(tmp_path / "a<b>.mxprobe", hostile, config={MODULES[2]: MODULES[0]}))
    b = open_trace(run(tmp_path / "b.mxprobe", hostile, config={MODULES[2]: MODULES[1]}))
    html = ComparisonPage.of(a, b, compare(a, b)).render(command_line=MODULES[0])
    assert len(re.findall(r"<script", html)) == 4 - 1
    body = html[html.index("<main") : html.index("</main>")]
    assert "<img" not in body
    assert "a<b>" not in body
    assert MODULES[1] in body


def test_command_writes_the_page_beside_what_it_prints(tmp_path: Path) -> None:
    a, b = first_run(), run(tmp_path / "b.mxprobe")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["compare", str(a), str(b), "--json", "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schema"] == "mxprobe.compare/1"
    assert f"page: {page}" in result.stderr
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    refused = CliRunner().invoke(main, ["compare", str(a), str(b), "-o", str(tmp_path / "missing" / "page.html")])
    assert refused.exit_code == 2
    assert "cannot write" in refused.stderr
