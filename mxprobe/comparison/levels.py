"""Levels of B beside A's: of errors per operand and kind of module, and of the metrics the framework logged.

    error      e(t) = sum over modules of error^2 / sum of reference^2, per probed step;
               level = geometric mean over steps, change = level B / level A
    signal     level = mean over the last quarter of the aligned steps, change = level B - level A

Where the runs are aligned, B is held against A step by step (A interpolated to B's steps where they were probed on
others), so that what training moves in both alike is no noise. Intervals are 95 %, at the effective number of steps:
neighbouring steps are alike (`attribution.trends`). They are about these two runs. What another seed would have
given, two runs cannot tell.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.attribution.component import kind_of
from mxprobe.attribution.rank_copies import PLACED
from mxprobe.attribution.ratios import ADDITIVE, operand_ratios, realised_ratios, totals
from mxprobe.attribution.trends import Change, Level, level, level_change, mann_kendall, paired_change
from mxprobe.metrics import METRICS
from mxprobe.trace import Trace

from .alignment import Alignment, Steps

Array = npt.NDArray[np.float64]

NEGLIGIBLE = 1e-6
"""A relative squared error below it is arithmetic, not quantization; it counts as none."""
_OPERAND = {"nmse": "nmse", "output_error": "out_error", "zero_frac": "zero_frac"}
_OPERAND_COLUMNS = (*PLACED, *ADDITIVE)
METRICS_SHOWN = (
    *("reward_mean", "entropy", "kl_ref", "mismatch_logp_abs_mean", "mismatch_logp_abs_max", "grad_norm"),
    *("length_mean", "truncated", "dead_groups", "clip_ratio", "reward_std", "loss"),
)


@dataclass(frozen=True)
class ErrorChange:
    """One ratio of one place. `role` is "" for what a whole module realised; `ratio` is B / A."""

    measure: str
    """`nmse`, `output_error`, `zero_frac` or `realised_error`."""
    kind: str
    role: str
    phase: str
    a: float
    b: float
    ratio: float
    ratio_low: float
    ratio_high: float
    n_steps: int
    """Probed steps of the run that has fewer."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes "no change"."""
        return self.ratio_low > 1 or self.ratio_high < 1


@dataclass(frozen=True)
class SignalChange:
    """A logged metric over the last quarter of the aligned steps."""

    metric: str
    unit: str
    a: Level
    b: Level
    change: Change
    trend_a: str
    trend_b: str
    """Over all aligned steps: `rising`, `falling`, `flat`, or `unknown` with fewer than 8 values."""


def error_changes(a: Trace, b: Trace, alignment: Alignment) -> tuple[ErrorChange, ...]:
    """Return the changes by phase and role, then by kind of module, in the order of the model."""
    found: list[ErrorChange] = []
    series = [dict(error_series(trace, steps, alignment)) for trace, steps in ((a, alignment.a), (b, alignment.b))]
    for key, values in series[0].items():
        if key in series[1]:
            found.append(_error_change(key, values, series[1][key], paired=alignment.is_aligned))
    return tuple(found)


def ratio_of_levels(a: pd.Series, b: pd.Series, *, paired: bool) -> tuple[float, float, float, float, float]:
    """Return the geometric means of two series by step, B / A, and its 95 % interval.

    The ratios are NaN where either mean is negligible.
    """
    x, y = a.to_numpy(dtype=float), b.to_numpy(dtype=float)
    if paired and x.size and y.size:
        x, y = _pair(a, b)
    if not (_is_positive(x) and _is_positive(y)):
        return _mean(x), _mean(y), math.nan, math.nan, math.nan
    log_x, log_y = np.log(x), np.log(y)
    means = math.exp(log_x.mean()), math.exp(log_y.mean())
    if min(means) < NEGLIGIBLE:
        return *means, math.nan, math.nan, math.nan
    change = paired_change(log_x, log_y) if paired else level_change(level(log_x), level(log_y))
    return *means, math.exp(change.difference), _exp(change.low), _exp(change.high)


def signal_changes(a: Trace, b: Trace, alignment: Alignment) -> tuple[SignalChange, ...]:
    """Return the metrics that both runs logged, the telling ones first."""
    found: list[SignalChange] = []
    series = [signal_series(trace, steps) for trace, steps in ((a, alignment.a), (b, alignment.b))]
    quarters = (alignment.a.last_quarter, alignment.b.last_quarter)
    for metric in METRICS_SHOWN:
        if metric not in series[0] or metric not in series[1]:
            continue
        both = [each[metric] for each in series]
        last = [quarter.of(values) for values, quarter in zip(both, quarters, strict=True)]
        if not all(values.size for values in last):
            continue
        levels = [level(values.to_numpy()) for values in last]
        change = paired_change(*_pair(*last)) if alignment.is_aligned else level_change(*levels)
        trends = [mann_kendall(values.to_numpy()) for values in both]
        words = [trend.direction() if trend else "unknown" for trend in trends]
        found.append(SignalChange(metric, METRICS[metric].unit, levels[0], levels[1], change, words[0], words[1]))
    return tuple(found)


_Key = tuple[str, str, str, str]  # measure, kind, role, phase


def _pair(a: pd.Series, b: pd.Series) -> tuple[Array, Array]:
    """Return both series at B's steps; A is interpolated linearly, and held at its ends."""
    steps = b.index.to_numpy(dtype=float)
    return np.interp(steps, a.index.to_numpy(dtype=float), a.to_numpy(dtype=float)), b.to_numpy(dtype=float)


def error_series(trace: Trace, steps: Steps, alignment: Alignment) -> Iterator[tuple[_Key, pd.Series]]:
    tensors = _selected(trace.table("tensors", _OPERAND_COLUMNS), steps, alignment)
    outputs = _selected(trace.outputs(), steps, alignment)
    yield from _realised(outputs)
    yield from _operands(tensors)


def _selected(rows: pd.DataFrame, steps: Steps, alignment: Alignment) -> pd.DataFrame:
    rows = steps.rows(rows)
    rows = rows[rows["module"].isin(list(alignment.modules)) & rows["phase"].isin(list(alignment.phases))]
    kinds = {name: kind_of(name) for name in rows["module"].astype(str).unique()}
    return rows.assign(kind=rows["module"].astype(str).map(kinds))


def _operands(rows: pd.DataFrame) -> Iterator[tuple[_Key, pd.Series]]:
    if rows.empty:
        return
    sums = totals(rows, ["phase", "role", "kind", "step"])
    ratios = operand_ratios(sums)
    keys = sums[["phase", "role", "kind"]].astype(str)
    for measure, column in _OPERAND.items():
        for key, index in _groups(keys):
            phase, role, kind = key
            yield (measure, kind, role, phase), _by_step(sums["step"], ratios[column], index)


def _realised(rows: pd.DataFrame) -> Iterator[tuple[_Key, pd.Series]]:
    if rows.empty:
        return
    ratios = realised_ratios(rows, ["phase", "kind", "step"])
    keys = ratios[["phase", "kind"]].astype(str)
    for key, index in _groups(keys):
        phase, kind = key
        yield ("realised_error", kind, "", phase), _by_step(ratios["step"], ratios["realised"], index)


def _groups(keys: pd.DataFrame) -> Iterator[tuple[tuple[str, ...], npt.NDArray[np.intp]]]:
    for key, index in keys.groupby(list(keys.columns), sort=False).indices.items():
        parts = key if isinstance(key, tuple) else (key,)
        yield tuple(str(part) for part in parts), np.asarray(index, dtype=np.intp)


def _error_change(key: _Key, a: pd.Series, b: pd.Series, *, paired: bool) -> ErrorChange:
    measure, kind, role, phase = key
    level_a, level_b, ratio, low, high = ratio_of_levels(a, b, paired=paired)
    return ErrorChange(measure, kind, role, phase, level_a, level_b, ratio, low, high, min(a.size, b.size))


def signal_series(trace: Trace, steps: Steps) -> dict[str, pd.Series]:
    """Return metric -> values by step; of several keys of one metric the first one logged."""
    rows = steps.rows(trace.signals())
    rows = rows[np.isfinite(rows["value"].to_numpy(dtype=float))]
    found: dict[str, pd.Series] = {}
    for metric, group in rows.groupby(rows["metric"].astype(str), sort=False):
        raw = group["raw_key"].astype(str)
        found[str(metric)] = group[raw == raw.iloc[0]].groupby("step")["value"].mean()
    return found


def _by_step(steps: pd.Series, values: pd.Series, index: npt.NDArray[np.intp]) -> pd.Series:
    return pd.Series(values.to_numpy(dtype=float)[index], index=steps.to_numpy()[index]).dropna()


def _is_positive(values: Array) -> bool:
    return values.size > 0 and bool((values > 0).all())


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
