"""What an always-on probe can afford: six numbers a tensor, in a fraction of the time of the decomposition. Shipped."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mxprobe_kernels.decomposition import Decomposition

LITE_COLUMNS = ("sum_x2", "sum_e2", "n_zeroed", "n_saturated", "n_nonfinite")


class Lite(NamedTuple):
    """Six statistics on the device of the input; nothing is copied from it before `to_dict`."""

    sums: torch.Tensor
    """float64 [5], by `LITE_COLUMNS`."""
    amax: torch.Tensor
    """float32 [], over the blocks without NaN or infinity."""

    def to_dict(self) -> dict[str, Any]:
        """Return Python numbers under the names of the decomposition."""
        values: dict[str, Any] = dict(zip(LITE_COLUMNS, self.sums.tolist()))
        counts = {name: int(value) for name, value in values.items() if name.startswith("n_")}
        return {**values, **counts, "amax": float(self.amax)}


def from_decomposition(d: Decomposition) -> Lite:
    """Return the part of a decomposition that `Lite` keeps; nothing is copied from its device."""
    return Lite(torch.stack([d.column(name) for name in LITE_COLUMNS]), d.column("amax").float())
