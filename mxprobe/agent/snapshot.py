"""Copies of one Linear call, taken in the training thread and measured later in ours.

R = rows (tokens, flattened over batch and sequence), K = in features, O = out features; _s = sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxprobe.agent.adapters.placement import WHOLE, Placement
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
    y: torch.Tensor | None
    """[R_s, O_s], with the bias; None where the module does not show it."""
    y_watched: torch.Tensor | None
    """[R_s, F], with the bias: the output features of `weight.watched`."""
    weight: WeightSample
    with_operands: bool
    """False where only the realised output error is wanted."""
    with_weights: bool
    gradient: torch.Tensor | None = None
    """[R_s, O], of the loss (scaled, under a GradScaler) by y; [R_gs, O] with `g_index`."""
    ready: Any = None
    """CUDA event after which the copies hold their values; None on the CPU."""
    placement: Placement = WHOLE
    g_index: torch.Tensor | None = None
    """Rows of G that are copied where G has other rows than X (sequence parallelism); None where it has the same."""
    x_of_gradient: torch.Tensor | None = None
    """[R_gs, K]: X at these rows, where they are among its own."""
    gradient_of_x: torch.Tensor | None = None
    """[R_s, O]: G at the rows of `x`, where these are among G's."""
    n_gradient_rows: int = 0
    """Rows of G that there were, with `g_index`."""

    @property
    def sampled_frac(self) -> float:
        return self.x.shape[0] / self.n_rows

    @property
    def n_tiles(self) -> int:
        return -(-self.x.shape[0] // TILE)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        if self.g_index is None:
            self.gradient = take(rows, self.row_index)
            return
        self.gradient, self.n_gradient_rows = take(rows, self.g_index), rows.shape[0]
        if self.placement.x_tokens.count > 1:
            own = rows.narrow(0, self.placement.x_tokens.index * self.n_rows, self.n_rows)
            self.gradient_of_x = take(own, self.row_index)

    def append_rows(self, other: Snapshot) -> None:
        """Join the rows of a later call of the same module in the same phase."""
        self.x = torch.cat((self.x, other.x))
        self.y = _joined(self.y, other.y)
        self.y_watched = _joined(self.y_watched, other.y_watched)
        self.n_rows += other.n_rows

    def mark_ready(self) -> None:
        """Record, without waiting, the point of the current CUDA stream at which the copies are complete."""
        self.ready = event_now(self.x.device)


def _joined(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return None if a is None or b is None else torch.cat((a, b))


def event_now(device: torch.device) -> Any:
    """The current point of the device's current CUDA stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def sample_rows(x: torch.Tensor, *, max_rows: int, out_features: int, seed: int) -> torch.Tensor | None:
    """Indices of the rows of [..., K] to copy; None for all."""
    limit = min(max_rows, MAX_ELEMENTS // max(x.shape[-1], out_features))
    if x.device.type == "cpu":
        limit = min(limit, CPU_MAX_ROWS)
    return sample_tiles(x.numel() // x.shape[-1], limit, seed=seed, device=x.device)
