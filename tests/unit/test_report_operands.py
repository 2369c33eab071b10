"""Operands of the page: sums added first and divided last, whatever is displayed."""

import numpy as np
import pandas as pd
import pytest

from mxprobe.attribution import ratios
from mxprobe.schema import Role
from mxprobe_reports import explorer, operands, packing, whatifs
from tests import report_frames

NAMES = report_frames.module_names(1)
STEPS = list(range(10, 130, 10))


def collect(rows: pd.DataFrame) -> operands.Operands:
    source = report_frames.rows_of("tensors", rows)
    return operands.collect(source, operands.scan(source), NAMES)


def whatifs_of(tried: pd.DataFrame, rows: pd.DataFrame) -> tuple[list[str], dict[str, np.ndarray]]:
    source = report_frames.rows_of("tensors", rows)
    return whatifs.collect(report_frames.rows_of("whatif", tried), source, operands.scan(source), collect(rows))


@pytest.fixture
def rows() -> pd.DataFrame:
    return report_frames.tensors(NAMES, STEPS)


def test_totals_are_the_sums_of_the_trace(rows: pd.DataFrame) -> None:
    collected = collect(rows)
    assert len(collected.totals) == len(NAMES) * len(Role)
    i = int(np.flatnonzero((collected.totals["module"] == 2) & (collected.totals["role"] == 1))[0])
    mine = rows[(rows["module"] == NAMES[2]) & (rows["role"] == collected.roles[1])]
    for name in ratios.ADDITIVE:
        assert collected.totals[name].iloc[i] == pytest.approx(mine[name].sum(), rel=1e-12)
    np.testing.assert_array_equal(collected.delta[i], np.sum(np.stack(list(mine["delta_hist"])), axis=0))


def test_bins_add_up_to_the_totals_and_the_parts_to_the_error(
    rows: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_SERIES_FLOATS", 9 * operands.N_LINES * len(NAMES) * len(Role))
    collected = collect(rows)
    assert collected.is_downsampled
    assert len(collected.binned.steps) == 9
    assert collected.n_probed_steps == len(STEPS)
    added = collected.binned.sums.groupby(level="operand")["sum_e2"].sum()
    np.testing.assert_allclose(added, collected.totals["sum_e2"])
    n, binned = len(collected.totals), collected.binned
    lines = explorer.lines(n, binned)
    nmse = operands.dense(n, binned, ratios.tensor_ratios(binned.sums)["nmse"])
    np.testing.assert_allclose(lines["scale"] + lines["deadzone"] + lines["grid"], nmse)
    out = operands.dense(n, binned, ratios.output_ratios(binned.sums)["out_error"])
    np.testing.assert_allclose(lines["out_scale"] + lines["out_deadzone"] + lines["out_grid"], out)


def test_what_the_page_script_adds_up_over_all_steps_is_the_column(rows: pd.DataFrame) -> None:
    collected = collect(rows)
    frame = explorer.columns(collected)
    lines = {name: np.nan_to_num(line) for name, line in explorer.lines(len(frame), collected.binned).items()}
    for name, (above, below, weight) in explorer.RATIOS.items():
        over = sum(lines[line] * lines[weight] for line in above).sum(axis=1)
        under = sum((lines[line] * lines[weight] for line in below), start=0.0) if below else lines[weight]
        np.testing.assert_allclose(over / np.asarray(under).sum(axis=1), frame[name], rtol=1e-9, err_msg=name)


def test_rows_with_a_sum_that_is_not_finite_are_left_out_and_counted(rows: pd.DataFrame) -> None:
    rows.loc[[3, 40], "sum_e2"] = [np.nan, np.inf]
    rows.loc[41, "n_nonfinite"] = 7
    collected = collect(rows)
    assert collected.n_bad_rows == 2
    assert np.isfinite(collected.totals["sum_e2"]).all()
    assert collected.first_nonfinite == (rows["step"][41], rows["module"][41], rows["role"][41])


def test_rows_of_an_operand_or_step_that_is_not_known_are_left_out(rows: pd.DataFrame) -> None:
    odd = rows.astype({"role": object, "module": object, "step": float})
    odd.loc[0, "role"], odd.loc[1, "module"], odd.loc[2, "step"] = "from_the_future", None, np.nan
    assert collect(odd).n_bad_rows == 3


def test_an_unknown_rule_has_no_gaussian_reference(rows: pd.DataFrame) -> None:
    frame = explorer.columns(collect(rows.assign(rule="ties_away")))
    assert frame["nmse_reference"].isna().all()
    assert frame["nmse"].notna().all()


def test_a_row_that_violates_the_identity_is_counted(rows: pd.DataFrame) -> None:
    assert collect(rows).n_identity_violations == 0
    rows.loc[5, "sum_grid2"] *= 1.001
    assert collect(rows).n_identity_violations == 1


def test_training_statistics_are_preferred_and_a_rollout_process_shows_its_own(rows: pd.DataFrame) -> None:
    rollout = rows.assign(phase="rollout")
    both = pd.concat([rows, rollout], ignore_index=True)
    assert collect(both).totals["n"].equals(collect(rows).totals["n"])
    assert collect(rollout).phase == "rollout"


def test_missing_histograms_are_zero(rows: pd.DataFrame) -> None:
    rows["delta_hist"] = [None] * len(rows)
    assert collect(rows).delta.sum() == 0


def test_whatifs_are_relative_to_the_uncorrected_quantizer(rows: pd.DataFrame) -> None:
    collected = collect(rows)
    # Tried on every other step only, as when weights are measured less often.
    tried = report_frames.whatif(rows[rows["step"] % 20 == 0])
    corrections, left = whatifs_of(tried, rows)
    assert corrections == ["mbs:128", "of:0.5"]
    for name in ("error", "output", "on_deadzone"):
        np.testing.assert_allclose(left[name], np.tile([0.85, 0.25], (len(collected.totals), 1)))
    np.testing.assert_allclose(
        left["zeroed"][:, 0] / (collected.totals["n_zeroed"] / collected.totals["n"]), 0.85, 1e-3
    )


def test_an_operand_without_whatifs_is_nan_not_zero(rows: pd.DataFrame) -> None:
    tried = report_frames.whatif(rows[(rows["module"] == NAMES[0]).to_numpy()])
    _, left = whatifs_of(tried, rows)
    assert np.isfinite(left["output"][: len(Role)]).all()
    assert np.isnan(left["output"][len(Role) :]).all()


def test_worst_forward_operand_is_selected_first(rows: pd.DataFrame) -> None:
    collected = collect(rows)
    source, tried = report_frames.rows_of("tensors", rows), report_frames.rows_of("whatif", report_frames.whatif(rows))
    first = explorer.page_data(collected, operands.scan(source), tried, source)["selected"]
    assert collected.roles[first["role"]] == "x_fwd"
    assert NAMES[first["module"]].endswith(report_frames.FED_BY_NORM)
