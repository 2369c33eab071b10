"""Files at full resolution come back equal; curves carry the numbers that `ratios` derives."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from mxprobe.attribution.ratios import mismatch_by_step, output_ratios, realised_ratios, tensor_ratios, totals
from mxprobe.cli import main
from mxprobe.exporting import curves
from mxprobe.exporting.series import COLUMNS as TABLES_OF_CURVES
from mxprobe.exporting.series import points, step_rows
from mxprobe.tables import TABLES
from mxprobe.trace import open_trace
from tests import report_frames
from tests.trace_files import FRAMES, frames, write_trace

HOSTILE = '</script>, "quoted"\nnew line; ☃ [bold]'


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = frames(n_layers=1, n_steps=40)
    tables["tensors"].loc[0, "sum_e2"] = math.nan
    tables["tensors"].loc[1, "out_e2"] = math.inf
    names = tables["modules"]["module"].astype(str).tolist()
    tables["modules"]["module"] = [HOSTILE, *names[1:]]
    return write_trace(tmp_path_factory.mktemp("export") / "run.mxprobe", tables)


def export(trace: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["export", str(trace), *options])


def test_parquet_holds_the_same_rows(trace: Path, tmp_path: Path) -> None:
    result = export(trace, "--format", "parquet", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    written = {Path(line).name for line in result.stdout.splitlines()}
    opened = open_trace(trace)
    filled = {name for name in TABLES if len(opened.table(name))}
    assert set(FRAMES) <= filled
    assert written == {*(f"{name}.parquet" for name in filled), "run.json"}
    for name in filled:
        read = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pandas()
        pd.testing.assert_frame_equal(read, opened.table(name))
    assert json.loads((tmp_path / "out" / "run.json").read_text())["schema_version"] == opened.run["schema_version"]


def test_csv_keeps_every_digit_name_and_list(trace: Path, tmp_path: Path) -> None:
    assert export(trace, "--format", "csv", "-o", str(tmp_path)).exit_code == 0
    opened = open_trace(trace)
    tensors = pd.read_csv(tmp_path / "tensors.csv")
    expected = opened.tensors()
    assert list(tensors.columns) == list(expected.columns)
    np.testing.assert_array_equal(tensors["sum_x2"], expected["sum_x2"])
    assert json.loads(tensors["delta_hist"][5]) == expected["delta_hist"][5].tolist()
    with open(tmp_path / "modules.csv", newline="", encoding="utf-8") as file:
        names = [row["module"] for row in csv.DictReader(file)]
    assert names == opened.table("modules")["module"].astype(str).tolist()
    assert names[0] == HOSTILE


def test_json_is_standard_json_with_null_for_what_is_not_finite(trace: Path, tmp_path: Path) -> None:
    assert export(trace, "--format", "json", "-o", str(tmp_path)).exit_code == 0
    rows = json.loads(
        (tmp_path / "tensors.json").read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON")
    )
    assert len(rows) == len(open_trace(trace).tensors())
    assert rows[0]["sum_e2"] is None
    assert rows[1]["out_e2"] is None
    assert rows[2]["role"] == "g_dgrad"


def test_ratios_are_those_of_the_one_place_that_derives_them(trace: Path, tmp_path: Path) -> None:
    export(trace, "--format", "parquet", "--table", "tensors", "--ratios", "-o", str(tmp_path))
    read = pq.read_table(tmp_path / "tensors.parquet").to_pandas()
    rows = open_trace(trace).tensors()
    np.testing.assert_allclose(read["nmse"], tensor_ratios(rows)["nmse"], equal_nan=True)
    np.testing.assert_allclose(read["out_error"][2:], output_ratios(rows)["out_error"][2:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "tensors.parquet"]


def test_what_is_there_is_kept(trace: Path, tmp_path: Path) -> None:
    export(trace, "--format", "csv", "--table", "events", "-o", str(tmp_path))
    (tmp_path / "events.csv").write_text("mine")
    again = export(trace, "--format", "csv", "--table", "events", "-o", str(tmp_path))
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert (tmp_path / "events.csv").read_text() == "mine"
    assert export(trace, "--format", "csv", "--table", "events", "-o", str(tmp_path), "--overwrite").exit_code == 0
    assert (tmp_path / "events.csv").read_text() != "mine"


def test_wrong_use(trace: Path, tmp_path: Path) -> None:
    assert export(trace).exit_code == 2
    assert export(trace, "--format", "csv", "--to", "wandb").exit_code == 2
    assert "no table 'tensor'" in export(trace, "--format", "csv", "--table", "tensor").stderr
    assert export(tmp_path / "missing", "--format", "csv").exit_code == 3
    itself = export(trace, "--format", "parquet", "-o", str(trace), "--overwrite")
    assert itself.exit_code == 2
    assert "is the trace itself" in itself.stderr
    (tmp_path / "file").write_text("")
    blocked = export(trace, "--format", "csv", "-o", str(tmp_path / "file" / "below"))
    assert blocked.exit_code == 2
    assert "cannot write" in blocked.stderr


def test_curves_are_sums_over_modules_divided_last(trace: Path) -> None:
    opened = open_trace(trace)
    points = curves(opened, modules=["*.0.mlp.up_proj"])
    by_step = {point.step: point for point in points}
    tensors = opened.tensors()
    rows = tensors[(tensors["step"] == 20) & (tensors["role"] == "x_fwd") & (tensors["phase"] == "train")]
    rows = rows[rows["module"].astype(str).str.endswith("up_proj")]
    expected = float(output_ratios(totals(rows, ["step"]))["out_error"].iloc[0])
    values = by_step[20].values
    assert values["mxprobe/train/x_fwd/up_proj/output_error"] == pytest.approx(expected)
    assert values["mxprobe/train/x_fwd/model.layers.0.mlp.up_proj/output_error"] == pytest.approx(expected)
    outputs = opened.outputs()
    realised = realised_ratios(outputs[outputs["step"] == 20], ["module", "phase"])
    wide = realised.pivot(index="module", columns="phase", values="realised")
    assert values["mxprobe/mismatch"] == pytest.approx(float((wide["rollout"] - wide["train"]).abs().median()))
    assert values["signals/reward_mean"] == pytest.approx(
        float(opened.signals().query("metric == 'reward_mean' and step == 20")["value"].iloc[0])
    )
    assert "signals/num_tokens" in values  # not mapped: under its own key
    assert [point.step for point in points] == sorted(by_step)
    assert all(math.isfinite(value) for point in points for value in point.values.values())


def test_two_keys_of_one_metric_keep_their_own_names(tmp_path: Path) -> None:
    signals = report_frames.signals(10)
    first, second = signals.copy(), signals.copy()
    for rows, key in ((first, "rewards/format/mean"), (second, "rewards/answer/mean")):
        rows["raw_key"], rows["metric"] = key, "reward_function_mean"
    both = pd.concat([first.iloc[:10], second.iloc[:10]])
    opened = open_trace(write_trace(tmp_path / "two.mxprobe", {"signals": both}))
    tags = set(curves(opened)[0].values)
    assert tags == {"signals/rewards/format/mean", "signals/rewards/answer/mean"}


def test_mismatch_needs_both_phases() -> None:
    rows = report_frames.outputs(["a"], [1, 2])
    assert len(mismatch_by_step(rows)) == 2
    assert mismatch_by_step(rows[rows["phase"] == "train"]).empty


def test_rows_dropped_are_counted_once_where_steps_were_added_up() -> None:
    rows = pd.DataFrame({"step": [4, 4, 4], "rank": [0, 0, 1], "probed": [True, False, True], "n_dropped": [7, 9, 2]})
    overhead = rows.assign(probe_ns=1, step_ns=10, time_ns=4)
    none = {name: pd.DataFrame(columns=list(TABLES_OF_CURVES[name])) for name in ("tensors", "outputs")}
    (point,) = points(step_rows({**none, "overhead": overhead}))
    assert point.values == {"mxprobe/n_dropped": 11.0, "mxprobe/overhead_frac": 0.1}
