"""Operands of a trace: sums per module and role, over the whole trace and per displayed bin of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.schema import DELTA_BINS, Phase, Role

from . import names, packing

SUMS: tuple[str, ...] = ratios.ADDITIVE
IDENTITY_TOLERANCE = 1e-5
"""Part of ||e||^2 by which the components of a row may miss it."""


@dataclass(frozen=True)
class Operands:
    """Operands that were measured, in model order, then role order.

    `totals` has one row per operand: `module` and `role` (positions in `modules` and `roles`), the sums of
    `SUMS`, `sampled_frac`, `n_clusters`, `format`, `rule`. `binned` has the same sums per (`operand`, `bin`).
    `delta` is (n_operands, 32) int64, `steps` the first step of each bin.
    """

    modules: list[str]
    roles: list[str]
    totals: pd.DataFrame
    binned: pd.DataFrame
    delta: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    n_probed_steps: int
    phase: str
    n_bad_rows: int
    """Rows left out: a sum is missing or not finite, or the operand is unknown."""
    first_nonfinite: tuple[int, str, str] | None
    """Step, module and role of the first row with NaN or infinite values in its tensor."""
    n_identity_violations: int
    """Rows whose components miss the total by more than `IDENTITY_TOLERANCE`."""

    @property
    def is_downsampled(self) -> bool:
        return len(self.steps) < self.n_probed_steps


def collect(tensors: pd.DataFrame, modules: Sequence[str]) -> Operands:
    """Add up the tensors table. `modules` are all names of the page in model order (a superset)."""
    phase = _main_phase(tensors)
    rows = tensors[tensors["phase"].astype(str) == phase].reset_index(drop=True) if phase else tensors.iloc[:0]
    sums = rows[list(SUMS)].apply(pd.to_numeric).astype(np.float64).to_numpy()
    named = rows[["step", "module", "role"]].notna().all(axis=1) & rows["role"].isin([role.value for role in Role])
    good = np.isfinite(sums).all(axis=1) & named.to_numpy()
    kept = rows[good].reset_index(drop=True)
    values = pd.DataFrame(sums[good], columns=pd.Index(SUMS))

    present = set(kept["role"].astype(str))
    roles = [role.value for role in Role if role.value in present]
    module_at = {name: i for i, name in enumerate(modules)}
    role_at = {name: i for i, name in enumerate(roles)}
    values["module"] = kept["module"].astype(str).map(module_at).to_numpy(dtype=np.int64)
    values["role"] = kept["role"].astype(str).map(role_at).to_numpy(dtype=np.int64)
    key = values["module"].to_numpy() * max(len(roles), 1) + values["role"].to_numpy()
    unique, operand = np.unique(key, return_inverse=True)
    values["operand"] = operand

    steps = np.unique(kept["step"].to_numpy(dtype=np.int64))
    n_bins = packing.display_bins(len(steps), len(unique) * len(SERIES))
    bins = packing.bin_of(len(steps), n_bins)
    values["bin"] = bins[np.searchsorted(steps, kept["step"].to_numpy(dtype=np.int64))]

    keys = {"module": "first", "role": "first"} | dict.fromkeys(SUMS, "sum")
    totals = values.groupby("operand").agg(keys)
    extra = pd.DataFrame({"operand": operand})
    for column, how in {"sampled_frac": "mean", "n_clusters": "min", "format": "last", "rule": "last"}.items():
        extra[column] = kept[column].astype(str if how == "last" else np.float64).to_numpy()
        totals[column] = extra.groupby("operand")[column].agg(how)
    gap = ratios.tensor_ratios(values)["identity_gap"]
    return Operands(
        modules=list(modules),
        roles=roles,
        totals=totals.reset_index(drop=True),
        binned=values.groupby(["operand", "bin"])[list(SUMS)].sum(),
        delta=_add_histograms(kept["delta_hist"], operand, len(unique)),
        steps=steps[np.searchsorted(bins, np.arange(n_bins))],
        n_probed_steps=len(steps),
        phase=phase,
        n_bad_rows=int((~good).sum()),
        first_nonfinite=_first_nonfinite(rows),
        n_identity_violations=int((gap > IDENTITY_TOLERANCE).sum()),
    )


SERIES: tuple[str, ...] = (
    "scale",
    "deadzone",
    "grid",
    "out_scale",
    "out_deadzone",
    "out_grid",
    "out_zeroed",
    "zero_frac",
    "saturated_frac",
)
"""Lines per operand that the page can draw over steps: parts of the error relative to the signal, and shares."""


def dense(operands: Operands, column: pd.Series) -> npt.NDArray[np.float64]:
    """A column indexed by (operand, bin) as (n_operands, n_bins), NaN where nothing was measured."""
    grid = np.full((len(operands.totals), len(operands.steps)), np.nan)
    index = column.index
    grid[index.get_level_values(0).to_numpy(), index.get_level_values(1).to_numpy()] = column.to_numpy(dtype=np.float64)
    return grid


def page_names(frames: Sequence[pd.DataFrame], modules: pd.DataFrame) -> list[str]:
    """Modules with a row in any of `frames`, in the order of the modules table."""
    seen = {str(name) for frame in frames for name in frame["module"].dropna().unique()}
    return names.in_model_order(seen, [str(name) for name in modules["module"]])


def _main_phase(tensors: pd.DataFrame) -> str:
    phases = tensors["phase"].dropna().astype(str)
    if phases.empty:
        return ""
    counts: Any = phases.value_counts()
    return Phase.TRAIN.value if Phase.TRAIN.value in counts.index else str(counts.index[0])


def _add_histograms(column: pd.Series, operand: npt.NDArray[np.int64], n_operands: int) -> npt.NDArray[np.int64]:
    added = np.zeros((n_operands, DELTA_BINS), dtype=np.int64)
    lengths = np.array([0 if bins is None or np.ndim(bins) == 0 else len(bins) for bins in column], dtype=np.int64)
    whole = np.flatnonzero(lengths == DELTA_BINS)
    if whole.size:
        stacked = np.stack([np.asarray(bins, dtype=np.int64) for bins in column.iloc[whole]])
        np.add.at(added, operand[whole], stacked)
    return added


def _first_nonfinite(rows: pd.DataFrame) -> tuple[int, str, str] | None:
    hit = rows[(pd.to_numeric(rows["n_nonfinite"]).fillna(0) > 0).to_numpy()]
    if hit.empty:
        return None
    first = hit.sort_values("step", kind="stable").iloc[0]
    return int(first["step"]), str(first["module"]), str(first["role"])
