"""The numbers that limits are about, taken from a trace: per operand, per module, and of the whole run.

Sums over all steps and ranks come first, the division last; what a tensor of zeros cannot tell is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from mxprobe.attribution.coverage import coverage_of
from mxprobe.attribution.measured import measure
from mxprobe.attribution.rank_copies import PLACED
from mxprobe.attribution.ratios import ADDITIVE, operand_ratios, realised_ratios, totals
from mxprobe.attribution.symptom import mismatch
from mxprobe.trace import Trace

OPERAND_LIMITS: dict[str, str] = {
    "max_nmse": "nmse",
    "max_output_error": "out_error",
    "max_zero_frac": "zero_frac",
    "max_saturated_frac": "saturated_frac",
}
"""Limit -> the ratio it bounds, per module, role and phase."""


_KEYS = ("module", "role", "phase")


@dataclass(frozen=True)
class Measure:
    """One number. `role` and `phase` are "" where they say nothing; `module` is "" for the whole run."""

    value: float
    module: str = ""
    role: str = ""
    phase: str = ""


class OperandMeasures:
    """Ratios of each module, role and phase in `tensors`, read once for all limits; of all roles if none are given."""

    def __init__(self, trace: Trace, roles: tuple[str, ...]) -> None:
        self._trace = trace
        self._roles = roles

    def of(self, limit: str) -> Iterator[Measure]:
        """Yield the ratio that a limit of `OPERAND_LIMITS` bounds; what cannot be divided is left out."""
        rows = self._rows
        keys = (rows[name].astype(str) for name in _KEYS)
        for module, role, phase, value in zip(*keys, rows[OPERAND_LIMITS[limit]], strict=True):
            if np.isfinite(value):
                yield Measure(float(value), module, role, phase)

    @cached_property
    def _rows(self) -> pd.DataFrame:
        rows = self._trace.table("tensors", (*PLACED, *ADDITIVE))
        if self._roles:
            rows = rows[rows["role"].isin(list(self._roles))]
        sums = totals(rows, _KEYS)
        return pd.concat([sums[list(_KEYS)], operand_ratios(sums)], axis=1)


def realised_measures(trace: Trace) -> Iterator[Measure]:
    """Yield the realised output error of each module and phase in `outputs`."""
    rows = realised_ratios(trace.outputs(), ["module", "phase"])
    for module, phase, value in zip(
        rows["module"].astype(str), rows["phase"].astype(str), rows["realised"], strict=True
    ):
        if np.isfinite(value):
            yield Measure(float(value), module, "", phase)


def run_measure(trace: Trace, limit: str) -> Measure | None:
    """Return a measure of the run; None where the trace cannot tell. KeyError for a limit that is not about a run."""
    value = {
        "max_mismatch": _mismatch,
        "max_nonfinite": _nonfinite,
        "min_coverage": lambda t: coverage_of(t.modules()).flops_frac,
        "min_steps": lambda t: float(measure(t).n_steps),
        "max_overhead": _overhead,
        "max_dropped": _dropped,
    }[limit](trace)
    return None if value is None or not np.isfinite(value) else Measure(value)


def _mismatch(trace: Trace) -> float | None:
    measured = measure(trace)
    found = mismatch(measured, np.ones(measured.n_clusters))
    return found.median if found.n_modules else None


def _nonfinite(trace: Trace) -> float | None:
    rows = trace.table("tensors", ("n_nonfinite",))
    return float(rows["n_nonfinite"].sum()) if len(rows) else None


def _overhead(trace: Trace) -> float | None:
    """Return the time in our hooks over step time, all ranks together."""
    rows = trace.overhead()
    steps = float(rows["step_ns"].sum())
    return float(rows["probe_ns"].sum()) / steps if steps > 0 else None


def _dropped(trace: Trace) -> float | None:
    """Return the last counter of each rank, added: they run from attach on."""
    rows = trace.overhead()
    return float(rows.groupby("rank")["n_dropped"].max().sum()) if len(rows) else None
