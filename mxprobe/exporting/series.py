"""A trace as curves over steps, named for an experiment tracker.

    signals/<metric>                                  as logged; the raw key where several share one metric
    mxprobe/<phase>/<role>/<kind>/<ratio>             nmse, output_error, zero_frac of one kind of module
    mxprobe/<phase>/<kind>/realised_error             and predicted_error
    mxprobe/mismatch                                  median |realised error in rollout - in training|
    mxprobe/overhead_frac, mxprobe/n_dropped

With `modules`, the same per module in place of the kind, for those whose name matches a glob.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from mxprobe.attribution.component import kind_of
from mxprobe.attribution.ratios import ADDITIVE, mismatch_by_step, operand_ratios, realised_ratios, totals
from mxprobe.trace import Trace

COLUMNS: dict[str, tuple[str, ...]] = {
    "signals": ("step", "time_ns", "raw_key", "metric", "value"),
    "tensors": ("step", "time_ns", "module", "role", "phase", *ADDITIVE),
    "outputs": ("step", "time_ns", "module", "phase", "ref2", "realised2", "predicted2", "residual2"),
    "overhead": ("step", "time_ns", "probe_ns", "step_ns", "n_dropped"),
}
"""The curves are made of these tables and columns."""
_OPERAND = {"nmse": "nmse", "out_error": "output_error", "zero_frac": "zero_frac"}


@dataclass(frozen=True)
class Point:
    """All curves' values at one step. `time_ns` is when the last of its rows was written."""

    step: int
    time_ns: int
    values: dict[str, float]


def curves(trace: Trace, modules: Sequence[str] = ()) -> list[Point]:
    """Return points in the order of their steps; values that are not finite are left out."""
    signals = trace.table("signals", COLUMNS["signals"])
    others = {name: trace.table(name, columns) for name, columns in COLUMNS.items() if name != "signals"}
    logged = signal_rows(placed(signals, others["overhead"]), keys_of(signals))
    return [*points([logged, *step_rows(others, modules)])]


def points(parts: Sequence[pd.DataFrame]) -> Iterator[Point]:
    """Gather long rows (`step`, `tag`, `value`, `time_ns`) by step; values that are not finite are left out."""
    rows = pd.concat([part for part in parts if len(part)] or [_long([], "", [], [])], ignore_index=True)
    rows = rows[np.isfinite(rows["value"].to_numpy(dtype=float))].sort_values("step", kind="stable")
    for step, group in rows.groupby("step", sort=True):
        values = dict(zip(group["tag"], group["value"].astype(float), strict=True))
        yield Point(int(step), int(group["time_ns"].max()), values)


def keys_of(signals: pd.DataFrame) -> dict[str, set[str]]:
    """Return metric -> the raw keys that were logged under it."""
    pairs = signals[["metric", "raw_key"]].astype(str).drop_duplicates()
    return {str(metric): set(group["raw_key"]) for metric, group in pairs.groupby("metric")}


def placed(signals: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Put metrics logged without a step (-1) at the last step before them by time; `steps` has `step` and `time_ns`."""
    is_unplaced = (signals["step"] < 0).to_numpy()
    if not is_unplaced.any() or steps.empty:
        return signals
    steps = steps.sort_values("time_ns")
    position = np.searchsorted(steps["time_ns"].to_numpy(dtype=float), signals["time_ns"].to_numpy(dtype=float))
    step = steps["step"].to_numpy()[np.maximum(position - 1, 0)]
    return signals.assign(step=np.where(is_unplaced, step, signals["step"]))


def signal_rows(rows: pd.DataFrame, keys: Mapping[str, Collection[str]]) -> pd.DataFrame:
    """Return logged metrics, long; under the raw key where `keys` has none or several for the metric."""
    rows = rows.dropna(subset=["step", "value"])
    if rows.empty:
        return _long([], "", [], [])
    metric, raw = rows["metric"].astype(str), rows["raw_key"].astype(str)
    is_shared = metric.map({name: len(of) > 1 for name, of in keys.items()}).astype(bool)
    name = raw.where((metric == "") | (metric == "nan") | is_shared, metric)
    return _long(rows["step"], "signals/" + name, rows["value"], rows["time_ns"].fillna(0))


def step_rows(tables: Mapping[str, pd.DataFrame], modules: Sequence[str] = ()) -> list[pd.DataFrame]:
    """Return all other curves, long, from whole steps of `tensors`, `outputs` and `overhead`."""
    return [
        *_operands(tables["tensors"], modules),
        *_outputs(tables["outputs"], modules),
        *_overhead(tables["overhead"]),
    ]


def _long(steps: object, tag: object, values: object, times: object) -> pd.DataFrame:
    return pd.DataFrame({"step": steps, "tag": tag, "value": values, "time_ns": times})


def _operands(rows: pd.DataFrame, modules: Sequence[str]) -> Iterator[pd.DataFrame]:
    for place, part in _places(rows, modules):
        sums = totals(part.assign(place=place), ["step", "phase", "role", "place"])
        when = part.groupby("step")["time_ns"].max()
        ratios = operand_ratios(sums)
        prefix = "mxprobe/" + sums["phase"].astype(str) + "/" + sums["role"].astype(str) + "/" + sums["place"] + "/"
        for column, name in _OPERAND.items():
            yield _long(sums["step"], prefix + name, ratios[column], sums["step"].map(when))


def _outputs(rows: pd.DataFrame, modules: Sequence[str]) -> Iterator[pd.DataFrame]:
    if rows.empty:
        return
    when = rows.groupby("step")["time_ns"].max()
    for place, part in _places(rows, modules):
        ratios = realised_ratios(part.assign(place=place), ["step", "phase", "place"])
        prefix = "mxprobe/" + ratios["phase"].astype(str) + "/" + ratios["place"] + "/"
        for column in ("realised", "predicted"):
            yield _long(ratios["step"], prefix + column + "_error", ratios[column], ratios["step"].map(when))
    difference = mismatch_by_step(rows)
    yield _long(difference.index, "mxprobe/mismatch", difference.to_numpy(), when.reindex(difference.index).to_numpy())


def _places(rows: pd.DataFrame, modules: Sequence[str]) -> Iterator[tuple[pd.Series, pd.DataFrame]]:
    """Yield (name of the place, rows): once by kind of module, once by module for those that a glob matches."""
    if rows.empty:
        return
    names = rows["module"].astype(str)
    kinds = {name: kind_of(name) for name in names.unique()}
    yield names.map(kinds), rows
    if modules:
        matching = names.map({name: any(fnmatchcase(name, glob) for glob in modules) for name in kinds})
        if matching.any():
            yield names[matching], rows[matching]


def _overhead(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    if rows.empty:
        return
    by_step = rows.groupby("step").agg(
        probe_ns=("probe_ns", "sum"), step_ns=("step_ns", "sum"), time_ns=("time_ns", "max")
    )
    # A counter since attach, and a window of added steps may have two rows of a rank.
    dropped = rows.groupby(["step", "rank"])["n_dropped"].max().groupby("step").sum().reindex(by_step.index)
    frac = by_step["probe_ns"] / by_step["step_ns"].where(by_step["step_ns"] > 0)
    yield _long(by_step.index, "mxprobe/overhead_frac", frac.to_numpy(), by_step["time_ns"].to_numpy())
    yield _long(by_step.index, "mxprobe/n_dropped", dropped.to_numpy(), by_step["time_ns"].to_numpy())
