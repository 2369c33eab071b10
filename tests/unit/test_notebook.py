"""Figures for notebooks hold the trace's numbers, and nothing of a name is read as markup."""

from pathlib import Path

import numpy as np
import pytest

from mxprobe.attribution.ratios import mismatch_by_step
from mxprobe.trace import open_trace
from mxprobe_reports import figures
from tests.hostile import MODULES, hostile
from tests.report_frames import module_names
from tests.trace_files import frames, write_trace


def test_figures_hold_the_numbers_of_the_trace(tmp_path: Path) -> None:
    trace = open_trace(write_trace(tmp_path / "run.mxprobe", frames(n_layers=1, n_steps=40)))
    made = figures(trace)
    assert list(made) == ["signals", "output_error", "mismatch"]
    signals = trace.signals()
    reward = signals[signals["metric"] == "reward_mean"]
    drawn = next(each for each in made["signals"].data if each.name == "reward_mean")
    np.testing.assert_allclose(drawn.y, reward["value"], rtol=1e-6)
    rows = trace.tensors()
    rows = rows[(rows["module"] == module_names(1)[2]) & (rows["role"] == "x_fwd")]
    heatmap = made["output_error"].data[0]
    assert heatmap.y[0] == "X fwd"
    assert 10 ** heatmap.z[0][2] == pytest.approx(rows["out_e2"].sum() / rows["out_ref2"].sum(), rel=1e-5)
    np.testing.assert_allclose(made["mismatch"].data[0].y, mismatch_by_step(trace.outputs()), rtol=1e-6)


def test_names_are_text_and_modules_that_slug_alike_stay_apart(tmp_path: Path) -> None:
    tables = frames(n_layers=1, n_steps=20)
    hostile(tables)
    heatmap = figures(open_trace(write_trace(tmp_path / "run.mxprobe", tables)))["output_error"].data[0]
    labels = list(heatmap.customdata[0])
    assert len(set(labels)) == np.asarray(heatmap.z).shape[1] == len(MODULES)
    assert not any("<" in label for label in labels)


def test_a_trace_without_rows_has_no_figures(tmp_path: Path) -> None:
    assert figures(open_trace(write_trace(tmp_path / "empty.mxprobe", {}))) == {}
