"""The first block at which generation and training part: table `layers`, held against its floor.

    off(block) = median over steps of median over tokens |s_train - s_rollout|^2 / |s_train|^2

A block is outside where that exceeds factor^2 x floor. The floor is the largest of what was measured (the same batch
put together otherwise, exact and as it runs) and of the rounding of the stream in its own dtype, which grows with
depth: (eps / 2)^2 (depth + 1).
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

COMPARISON = "generation_training"
FLOORS = ("floor", "floor_own")
FACTOR = 3.0


@dataclass(frozen=True)
class Divergence:
    """Differences are energies relative to the stream's."""

    layer: str | None
    """The first block outside its floor; None where none is."""
    depth: int
    n_layers: int
    n_steps: int
    difference: float
    """Of that block; of the last one where none is outside."""
    floor: float
    is_measured: bool
    """The floor comes from a replay, not from the dtype alone."""


def first_divergence(layers: pd.DataFrame, *, factor: float = FACTOR) -> Divergence | None:
    """Return it from a `layers` frame; None where no block was seen on both sides."""
    rows = layers[layers["comparison"].astype(str) == COMPARISON]
    if rows.empty:
        return None
    off = _median(rows)
    floors = layers[layers["comparison"].astype(str).isin(FLOORS)]
    measured = (
        floors.groupby(["comparison", "layer"], observed=True)["median_frac"].median().groupby(level="layer").max()
    )
    rounding = (off["eps"] / 2.0) ** 2 * (off["depth"] + 1.0)
    floor = measured.reindex(off.index).fillna(0.0).clip(lower=rounding)
    outside = off["median_frac"] > factor**2 * floor
    at = int(np.argmax(outside.to_numpy())) if outside.any() else len(off) - 1
    return Divergence(
        layer=str(off.index[at]) if outside.any() else None,
        depth=int(off["depth"].iloc[at]),
        n_layers=len(off),
        n_steps=int(rows["step"].nunique()),
        difference=float(off["median_frac"].iloc[at]),
        floor=float(floor.iloc[at]),
        is_measured=bool(len(measured)),
    )


def _median(rows: pd.DataFrame) -> pd.DataFrame:
    """Return medians per block, in the order of depth."""
    by = rows.groupby("layer", observed=True)
    found = by.agg(depth=("depth", "first"), median_frac=("median_frac", "median"), eps=("eps", "max"))
    return found.sort_values("depth")
