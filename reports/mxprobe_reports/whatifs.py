"""What each correction leaves of the error, operand by operand, against the uncorrected quantizer on the same rows."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from . import names
from .operands import Operands

LEFT: tuple[str, ...] = ("output", "error", "on_deadzone", "zeroed")
_ROW = ["rank", "step", "micro_step", "module", "role", "phase"]
_BASE = ["sum_e2", "sum_e2_on_d", "out_e2", "out_ref2"]


def collect(
    whatif: pd.DataFrame, tensors: pd.DataFrame, operands: Operands
) -> tuple[list[str], dict[str, npt.NDArray[np.float64]]]:
    """Corrections, and (n_operands, n_corrections) arrays named by `LEFT`, NaN where nothing was tried.

    `output`, `error` and `on_deadzone` are energies left, of the GEMM output's error, of the operand's and of its
    part on the deadzone, relative to the uncorrected quantizer; `zeroed` is the fraction of values that become 0.
    """
    tried = whatif[(whatif["phase"].astype(str) == operands.phase).to_numpy()]
    corrections = sorted({str(name) for name in tried["correction"].dropna().unique()}, key=names.natural_key)
    left = {name: np.full((len(operands.totals), len(corrections)), np.nan) for name in LEFT}
    if tried.empty or operands.totals.empty:
        return corrections, left
    text = {"module": str, "role": str, "phase": str}
    base = tensors[[*_ROW, *_BASE]].astype(text)
    paired = tried.astype({**text, "correction": str}).merge(base, on=_ROW, suffixes=("", "_base"))
    numbers = ["n", "n_zeroed", "sum_e2", "sum_e2_on_d", "out_e2", "out_ref2", *(f"{name}_base" for name in _BASE)]
    finite = np.isfinite(paired[numbers].to_numpy(dtype=float)).all(axis=1)
    sums = paired[finite].groupby(["module", "role", "correction"])[numbers].sum()
    ratio = pd.DataFrame(
        {
            "output": _over(sums["out_e2"] * sums["out_ref2_base"], sums["out_e2_base"] * sums["out_ref2"]),
            "error": _over(sums["sum_e2"], sums["sum_e2_base"]),
            "on_deadzone": _over(sums["sum_e2_on_d"], sums["sum_e2_on_d_base"]),
            "zeroed": _over(sums["n_zeroed"], sums["n"]),
        }
    )
    keys = zip(operands.totals["module"], operands.totals["role"], strict=True)
    row_at = {(operands.modules[int(m)], operands.roles[int(r)]): i for i, (m, r) in enumerate(keys)}
    column_at = {name: c for c, name in enumerate(corrections)}
    for (module, role, correction), values in zip(ratio.index, ratio.to_dict("records"), strict=True):
        if (module, role) in row_at:
            for name in LEFT:
                left[name][row_at[module, role], column_at[correction]] = values[name]
    return corrections, left


def _over(above: pd.Series, below: pd.Series) -> pd.Series:
    return above.astype(float) / below.astype(float).where(below > 0)
