"""Do the optimizer's updates reach the quantized policy, and do weights oscillate between two codes?

    flip_frac   = elements whose quantized value changed / elements          code_flip_frac: whose E2M1 code changed
    cosine      = <dW, dQ> / (||dW|| ||dQ||)                                  how much of what arrives was meant
    norm_ratio  = ||dQ|| / ||dW||                                            1 would be an update that arrives whole
    return_frac = of the flipped, those back at the value of one version before
    r_w         = sum |dQ| / sum |dW|                                        TetraJet's oscillation ratio, one step
    near_frac   = elements within a tenth of a grid step of a rounding boundary; .2 where they lie evenly

Between the weights of neighbouring steps (`mxprobe.measuring.versions.weight_updates`), on the watched output features.
Sums first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

_COUNTS = ["n", "n_flipped", "n_code_flipped", "n_returned", "n_near", "n_returnable"]
_SUMS = ["sum_w2", "sum_dw2", "sum_dq2", "sum_dw_dq", "sum_abs_dw", "sum_abs_dq"]


@dataclass(frozen=True)
class UpdateVisibility:
    """Of all modules together; ratios are NaN where nothing changed."""

    n_modules: int
    n_steps: int
    relative_update: float
    """||dW|| / ||W|| of one step."""
    flip_frac: float
    cosine: float
    norm_ratio: float
    return_frac: float
    near_frac: float
    r_w: float


def update_ratios(updates: pd.DataFrame, by: Sequence[str] = ("module",)) -> pd.DataFrame:
    """Return the ratios above and `relative_update` = ||dW|| / ||W|| per group of an `updates` frame."""
    sums = updates.groupby(list(by), observed=True, sort=True)[[*_COUNTS, *_SUMS]].sum()
    value = {name: sums[name].to_numpy(dtype=float) for name in (*_COUNTS, *_SUMS)}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {
            "relative_update": np.sqrt(value["sum_dw2"] / value["sum_w2"]),
            "flip_frac": value["n_flipped"] / value["n"],
            "code_flip_frac": value["n_code_flipped"] / value["n"],
            "cosine": value["sum_dw_dq"] / np.sqrt(value["sum_dw2"] * value["sum_dq2"]),
            "norm_ratio": np.sqrt(value["sum_dq2"] / value["sum_dw2"]),
            "return_frac": np.where(value["n_returnable"] > 0, value["n_returned"] / value["n_flipped"], np.nan),
            "near_frac": value["n_near"] / value["n"],
            "r_w": value["sum_abs_dq"] / value["sum_abs_dw"],
        }
    return pd.DataFrame(ratios, index=sums.index).reset_index()


def update_visibility(updates: pd.DataFrame) -> UpdateVisibility | None:
    """Return it for all modules and steps; None where the trace holds no two neighbouring versions of a weight."""
    if updates.empty:
        return None
    row = update_ratios(updates.assign(all=0), ("all",)).iloc[0]
    names = ("relative_update", "flip_frac", "cosine", "norm_ratio", "return_frac", "near_frac", "r_w")
    found = {name: float(row[name]) for name in names}
    return UpdateVisibility(updates["module"].nunique(), updates["step"].nunique(), **found)
