"""Copies of one Linear call, taken in the training thread and measured later in ours.

R = rows (tokens, flattened over batch and sequence), K = in features, O = out features; _s = sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxprobe.agent.sampling import TILE, sample_tiles, take
from mxprobe.agent.weights import WeightSample

CPU_MAX_ROWS = 128
"""Rows measured where a CPU does it: about 25 ms for the six operands of a 64 x 64 Linear and eleven corrections."""
MAX_ELEMENTS = 1 << 24
"""Elements of one copied operand, over which rows of very wide modules are sampled."""


@dataclass
class Snapshot:
    """One module, one phase, one probed step. `gradient` arrives with the backward pass."""

    module: str
    phase: str
    step: int
    """Steps since attach, counting the one being computed: 1 for the first."""
    micro_step: int
    time_ns: int
    n_rows: int
    """Rows there were; the first dimension of `x` says how many were copied."""
    row_index: torch.Tensor | None
    x: torch.Tensor
    """[R_s, K]"""
    y: torch.Tensor
    """[R_s, O_s], with the bias."""
    y_watched: torch.Tensor
    """[R_s, F], with the bias: the output features of `weight.watched`."""
    weight: WeightSample
    with_operands: bool
    """False where only the realised output error is wanted."""
    with_weights: bool
    gradient: torch.Tensor | None = None
    """[R_s, O], of the loss (scaled, under a GradScaler) by y."""
    ready: Any = None
    """CUDA event after which the copies hold their values; None on the CPU."""

    @property
    def sampled_frac(self) -> float:
        return self.x.shape[0] / self.n_rows

    @property
    def n_tiles(self) -> int:
        return -(-self.x.shape[0] // TILE)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        self.gradient = take(gradient.reshape(-1, gradient.shape[-1]), self.row_index)

    def append_rows(self, other: Snapshot) -> None:
        """Join the rows of a later call of the same module in the same phase."""
        self.x = torch.cat((self.x, other.x))
        self.y = torch.cat((self.y, other.y))
        self.y_watched = torch.cat((self.y_watched, other.y_watched))
        self.n_rows += other.n_rows

    def mark_ready(self) -> None:
        """Record, without waiting, the point of the current CUDA stream at which the copies are complete."""
        self.ready = event_now(self.x.device)


def event_now(device: torch.device) -> Any:
    """The current point of the device's current CUDA stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def sample_rows(x: torch.Tensor, *, max_rows: int, out_features: int, seed: int) -> torch.Tensor | None:
    """Indices of the rows of [..., K] to copy; None for all."""
    limit = min(max_rows, MAX_ELEMENTS // max(x.shape[-1], out_features))
    if x.device.type == "cpu":
        limit = min(limit, CPU_MAX_ROWS)
    return sample_tiles(x.numel() // x.shape[-1], limit, seed=seed, device=x.device)
