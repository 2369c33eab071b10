"""What one pass over a tensor yields: every sum, count and histogram, still on its device. Shipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxprobe_kernels.columns import CODE_BINS, COUNTS, DELTA_BINS, ENERGY_SUMS

AMAX_INDEX = len(ENERGY_SUMS) + len(COUNTS)
_DELTA = AMAX_INDEX + 1
_CODES = _DELTA + DELTA_BINS
N_VALUES = _CODES + CODE_BINS

_INDEX: dict[str, int] = {name: i for i, name in enumerate((*ENERGY_SUMS, *COUNTS, "amax"))}


@dataclass(frozen=True)
class Decomposition:
    """Sums of a decomposition, under the names of `columns.ENERGY_SUMS` and `columns.COUNTS`.

    `d.sum_e2` (float), `d.n_zeroed` (int), `d.amax` (float), `d.delta_hist` (32 ints: blocks by log2(s/s*) in
    [0, 1), outside clipped to the end bins, zero and excluded blocks left out) and `d.code_hist` (16 ints:
    elements by sign * 8 + E2M1 code) copy from the device and therefore synchronise; nothing before that does.
    `a + b` adds two parts of one tensor (steps, ranks, layers) without a copy.
    """

    values: torch.Tensor
    """float64[72] on the device of the input: sums, counts (exact below 2^53), amax, both histograms."""
    format: str
    rule: str

    def __add__(self, other: Decomposition) -> Decomposition:
        if (self.format, self.rule) != (other.format, other.rule):
            raise ValueError(
                f"cannot add a decomposition under {self.format}/{self.rule} to one under {other.format}/{other.rule}"
            )
        return Decomposition(combine(torch.stack((self.values, other.values))), self.format, self.rule)

    def __getattr__(self, name: str) -> Any:
        if name in _INDEX:
            value = float(self.values[_INDEX[name]])
            return int(value) if name in COUNTS else value
        if name == "delta_hist":
            return [int(v) for v in self.values[_DELTA:_CODES].tolist()]
        if name == "code_hist":
            return [int(v) for v in self.values[_CODES:].tolist()]
        raise AttributeError(name)

    def column(self, name: str) -> torch.Tensor:
        """Return one sum, count or `amax`, float64 [], still on its device."""
        return self.values[_INDEX[name]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as Python numbers and lists, in one copy from the device."""
        local = Decomposition(self.values.cpu(), self.format, self.rule)
        return {name: getattr(local, name) for name in (*_INDEX, "delta_hist", "code_hist")}


def combine(parts: torch.Tensor) -> torch.Tensor:
    """Add up parts [n, N_VALUES] into [N_VALUES]; of amax take the maximum."""
    total = parts.sum(0)
    total[AMAX_INDEX] = parts[:, AMAX_INDEX].amax(0)
    return total


def pack(
    sums: torch.Tensor, counts: torch.Tensor, amax: torch.Tensor, delta: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Join sums [14], counts [9], amax [] and the histograms [32] and [16] into float64 [N_VALUES]."""
    return torch.cat((sums, counts.double(), amax.double().reshape(1), delta.double(), codes.double()))


def empty(device: torch.device) -> torch.Tensor:
    """Return the neutral element of `combine`, float64 [N_VALUES]."""
    return torch.zeros(N_VALUES, dtype=torch.float64, device=device)
