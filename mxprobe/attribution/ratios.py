"""Every ratio mxprobe shows, derived from stored sums in this one place: add first, divide last.

    e = Q(x) - x = e_scale + e_dz + e_grid          (science, section 2; <e_dz, e_grid> = 0)

    remainder split    scale    = 1 - ||Q*(x) - x||^2 / ||e||^2      what an ideal scale would remove; signed
                       deadzone = ||e_dz||^2   / ||e||^2
                       grid     = ||e_grid||^2 / ||e||^2             the three sum to 1
    region split       on D, off D                                   non-negative
    realised split     saturated, zeroed, rest                       of the quantizer as it ran

Through a GEMM the deadzone and grid parts are no longer orthogonal. Their cross term is shared equally, so
that the remainder split of the output still sums to 1; `out_cross_dz_grid` states its size.
A ratio whose denominator is zero or missing is NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from mxprobe.schema import COUNTS, ENERGY_SUMS, Phase
from mxprobe.tables import OUTPUT_SUMS
from mxprobe.trace import Trace
from mxprobe.trace.aggregation import Aggregation

from .rank_copies import Copies, distinct

SHARES = ("zeroed", "saturated", "scale", "deadzone", "grid")
"""Parts of an error: made on such elements alone, and the remainder split."""
ADDITIVE = (*COUNTS, *ENERGY_SUMS, *OUTPUT_SUMS)


def totals(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the sums of the additive columns of a `tensors` or `whatif` frame per group; `amax` is the maximum.

    Returns a frame with the keys as columns. A sum over nothing but missing values is NaN, not 0. What several ranks
    hold copies of is counted once where the frame says so (`identity.distinct`).
    """
    frame = distinct(frame, by)
    additive = [name for name in frame.columns if name in ADDITIVE]
    grouped = frame.groupby(list(by), observed=True, sort=True)
    sums = grouped[additive].sum(min_count=1)
    if "amax" in frame.columns:
        sums["amax"] = grouped["amax"].max()
    return sums.reset_index()


def sums_of(trace: Trace, table: str, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Return `totals` over all rows of a table, by the trace's engine; an empty frame where it has none.

    Copies on several ranks are counted once, as `identity.distinct` does: by the lowest rank that has the part at all.
    """
    copies = Copies.of(trace, table) if "rank" not in by else None
    if copies is None:
        return trace.sums(Aggregation(table, tuple(by), tuple(columns)))[[*by, *columns]]
    keys = dict.fromkeys((*by, *copies.keys, "rank"))
    rows = copies.removed(trace.sums(Aggregation(table, tuple(keys), tuple(columns))))
    return totals(rows[[*by, *columns]], by)


def tensor_ratios(sums: pd.DataFrame | Mapping[str, Any]) -> pd.DataFrame:
    """Return the ratios of the tensor error, one row per row of `sums` (columns as in the `tensors` table).

    Columns: `nmse`, `sqnr_db`, `log2_rms`; remainder split `scale`, `deadzone`, `grid`; `on_d`, `off_d`;
    `zeroed`, `saturated`, `rest`; raw `raw_scale`, `raw_deadzone`, `raw_grid`, `raw_cross`, `cos_scale_grid`
    (for comparison with the paper only); `zero_frac`, `deadzone_frac`, `saturated_frac`,
    `zero_by_scale_frac`, `gain`, `gain_ideal`, `mean_error`, `identity_gap`.
    """
    data = _frame(sums)
    e2, x2, n = data["sum_e2"], data["sum_x2"], data["n"]
    nmse = _divide(e2, x2)
    ideal2 = data["sum_dz2"] + data["sum_grid2"]
    cross = data["sum_scale_grid"] + data["sum_scale_dz"]
    zeroed, saturated = _divide(data["sum_e2_zeroed"], e2), _divide(data["sum_e2_saturated"], e2)
    return pd.DataFrame(
        {
            "nmse": nmse,
            "sqnr_db": -10.0 * _log10(nmse),
            "log2_rms": _log10(_divide(x2, n)) / (2.0 * np.log10(2.0)),
            "scale": 1.0 - _divide(ideal2, e2),
            "deadzone": _divide(data["sum_dz2"], e2),
            "grid": _divide(data["sum_grid2"], e2),
            "on_d": _divide(data["sum_e2_on_d"], e2),
            "off_d": 1.0 - _divide(data["sum_e2_on_d"], e2),
            "zeroed": zeroed,
            "saturated": saturated,
            "rest": 1.0 - zeroed - saturated,
            "raw_scale": _divide(data["sum_scale2"], e2),
            "raw_deadzone": _divide(data["sum_dz2"], e2),
            "raw_grid": _divide(data["sum_grid2"], e2),
            "raw_cross": _divide(2.0 * cross, e2),
            "cos_scale_grid": _divide(data["sum_scale_grid"], (data["sum_scale2"] * data["sum_grid2"]) ** 0.5),
            "zero_frac": _divide(data["n_zeroed"], n),
            "zero_by_scale_frac": _divide(data["n_zeroed_by_scale"], n),
            "deadzone_frac": _divide(data["n_deadzone"], n),
            "saturated_frac": _divide(data["n_saturated"], n),
            "gain": _divide(data["sum_xq"], x2),
            "gain_ideal": _divide(data["sum_xqstar"], x2),
            "mean_error": _divide(data["sum_e"], n),
            "identity_gap": _divide((data["sum_scale2"] + ideal2 + 2.0 * cross - e2).abs(), e2),
        }
    )


def output_ratios(sums: pd.DataFrame | Mapping[str, Any]) -> pd.DataFrame:
    """Return the ratios of the GEMM-output error with this one operand quantized, one row per row of `sums`.

    Columns: `out_error` = ||output error||^2 / ||output||^2; remainder split `out_scale`, `out_deadzone`,
    `out_grid`; `out_zeroed`, `out_saturated`: the error made on such elements alone (zeroed and the rest
    correlate through the GEMM, so these may exceed 1); `out_cross_dz_grid`.
    """
    data = _frame(sums)
    e2, parts = data["out_e2"], output_parts(data)
    return pd.DataFrame(
        {
            "out_error": _divide(e2, data["out_ref2"]),
            **{f"out_{name}": _divide(parts[name], e2) for name in (*SHARES[2:], *SHARES[:2])},
            "out_cross_dz_grid": _divide(2.0 * data["out_dz_grid"], e2),
        }
    )


def output_parts(sums: pd.DataFrame | Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of ||output error||^2 by name, `SHARES`, from sums of any shape by the names of `OUTPUT_SUMS`.

    `scale`, `deadzone` and `grid` sum to the whole: the cross term of the last two is shared equally.
    """
    cross = sums["out_dz_grid"]
    return {
        "zeroed": sums["out_zeroed2"],
        "saturated": sums["out_saturated2"],
        "scale": sums["out_e2"] - (sums["out_dz2"] + sums["out_grid2"] + 2.0 * cross),
        "deadzone": sums["out_dz2"] + cross,
        "grid": sums["out_grid2"] + cross,
    }


def operand_ratios(sums: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of `tensor_ratios` and of `output_ratios`, one row per row of `sums`."""
    return pd.concat([tensor_ratios(sums), output_ratios(sums)], axis=1)


def left_by_corrections(tensors: pd.DataFrame, whatif: pd.DataFrame) -> pd.DataFrame:
    """Return the part of an operand's output error that each correction leaves: a row per (module, role), as texts.

    tensors, whatif: frames with `out_e2`. NaN where a correction was not measured, or there was no error.
    """
    before = _output_errors(tensors, ["module", "role"])
    after = _output_errors(whatif, ["module", "role", "correction"]).unstack()
    return after.div(before.where(before > 0), axis=0)


def _output_errors(rows: pd.DataFrame, by: list[str]) -> pd.Series:
    sums = rows.groupby(by, observed=True)["out_e2"].sum()
    # Plain strings for index, so that categories of two tables meet.
    return pd.Series(sums.to_numpy(), index=pd.MultiIndex.from_frame(sums.index.to_frame(index=False).astype(str)))


def realised_ratios(outputs: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return realised against predicted output error per group of an `outputs` frame.

    Columns beside the keys: `realised`, `predicted`, `residual` (all relative to ||x W^T||^2), and
    `log2_ratio` = log2(realised / predicted): inf where nothing was predicted, NaN where nothing was realised.
    """
    names = ["ref2", "realised2", "predicted2", "residual2"]
    sums = outputs.groupby(list(by), observed=True, sort=True)[names].sum(min_count=1).reset_index()
    realised, predicted = _divide(sums["realised2"], sums["ref2"]), _divide(sums["predicted2"], sums["ref2"])
    with np.errstate(divide="ignore", invalid="ignore"):
        log2_ratio = np.log2(realised.to_numpy()) - np.log2(predicted.to_numpy())
    return pd.DataFrame(
        {
            **{name: sums[name] for name in by},
            "realised": realised,
            "predicted": predicted,
            "residual": _divide(sums["residual2"], sums["ref2"]),
            "log2_ratio": np.where(realised > 0, log2_ratio, np.nan),
        }
    )


def mismatch_by_step(outputs: pd.DataFrame) -> pd.Series:
    """Return step -> median over modules of |realised error in rollout - in training|, from rows of `outputs`.

    Empty where one phase was not seen. Modules that do the same on both sides count with what their tokens differ
    by; the verdict's own figure (`symptom.mismatch`) takes them as 0.
    """
    rows = realised_ratios(outputs, ["step", "module", "phase"])
    wide = rows.assign(phase=rows["phase"].astype(str)).pivot(
        index=["step", "module"], columns="phase", values="realised"
    )
    phases = [Phase.ROLLOUT.value, Phase.TRAIN.value]
    if not set(phases) <= set(wide.columns):
        return pd.Series(dtype=float)
    difference = (wide[phases[0]] - wide[phases[1]]).abs().dropna()
    return difference.groupby(level="step").median()


def _frame(sums: pd.DataFrame | Mapping[str, Any]) -> pd.DataFrame:
    return sums if isinstance(sums, pd.DataFrame) else pd.DataFrame([dict(sums)])


def _divide(numerator: pd.Series, denominator: pd.Series) -> pd.Series:
    below = denominator.astype(float)
    return numerator.astype(float) / below.where(below > 0)


def _log10(values: pd.Series) -> pd.Series:
    return pd.Series(np.log10(values.where(values > 0).to_numpy(dtype=float)), index=values.index)
