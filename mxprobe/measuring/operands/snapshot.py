"""Copies of one Linear call, taken in the training thread and measured later in ours.

R = rows (tokens, flattened over batch and sequence), K = in features, O = out features; _s = sampled.

Where rows are sampled there are two samples, one behind the other: whole 32-token tiles, for the products whose blocks
run along tokens, and single rows, the largest always among them, for all else (`mxprobe.measuring.sampling`). The
single rows of G are those of its own largest, not of X's. `mxprobe.measuring.operands.copying` takes the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxprobe.measuring.adapters.placement import WHOLE, Placement
from mxprobe.measuring.operands.stack import Sample, Stack
from mxprobe.measuring.operands.weights import WeightSample
from mxprobe.measuring.sampling import TILE, Rows, row_norms, sample_singles, seed_of, take


@dataclass
class Moment:
    """What is measured, and when."""

    module: str
    phase: str
    step: int
    """Steps since attach, counting the one being computed: 1 for the first."""
    micro_step: int
    time_ns: int

    def key(self) -> dict[str, Any]:
        """Return the columns that all its rows share."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "time_ns": self.time_ns,
            "module": self.module,
            "phase": self.phase,
        }


@dataclass
class Snapshot(Moment):
    """One module, one phase, one probed step. `gradient` arrives with the backward pass."""

    n_rows: int
    """Rows there were; the first dimension of `x` says how many were copied."""
    x: torch.Tensor
    """[R_s, K]"""
    weight: WeightSample
    with_operands: bool
    """False where only the realised output error is wanted."""
    with_weights: bool
    row_index: torch.Tensor | None = None
    """int64 [R_s]; None for all rows."""
    y: torch.Tensor | None = None
    """[R_s, O_s], with the bias; None where the module does not show it."""
    y_watched: torch.Tensor | None = None
    """[R_s, F], with the bias: the output features of `weight.watched`."""
    gradient: torch.Tensor | None = None
    """[R_s, O], of the loss (scaled, under a GradScaler) by y; [R_gs, O] with `g_index`."""
    chosen: torch.Tensor | None = None
    """int64 [R_s, k]: the experts that a router chose."""
    ready: Any = None
    """CUDA event after which the copies hold their values; None on the CPU."""
    n_tile_rows: int = 0
    """Copied rows that are whole tiles; the others are single ones. 0: all serve both purposes."""
    singles: Rows | None = None
    """Which the single rows of X are; None where all rows there are were copied, or tiles alone."""
    singles_of_gradient: Rows | None = None
    weights: torch.Tensor | None = None
    """float64 [R_s]: of rows joined from several calls."""
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
        return self.single(self.x).shape[0] / max(self.n_rows, 1)

    @property
    def tile_frac(self) -> float:
        return self.tiled(self.x).shape[0] / max(self.n_rows, 1)

    def tiled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the whole tiles of copied rows (of x, y or the gradient)."""
        return rows[: self.n_tile_rows] if self.n_tile_rows else rows

    def single(self, rows: torch.Tensor) -> torch.Tensor:
        """Return those copied rows that stand for all by their weights."""
        return rows[self.n_tile_rows :]

    def row_weights(self) -> torch.Tensor | None:
        """float64 [rows of `single(x)`], at most 1: what each counts; None where all count 1."""
        weights = self.weights if self.singles is None else self.singles.weights()
        return None if weights is None else weights / weights.max()

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Copy the rows wanted of G [..., O], in the training thread, without waiting."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        if self.singles is not None and self.row_index is not None:
            n, seed = self.singles.index.shape[0], seed_of(self.step, self.module) + 2
            own = self.singles_of_gradient = sample_singles(row_norms(rows), n, seed=seed)
            index = self.row_index if own is None else torch.cat((self.tiled(self.row_index), own.index))
            self.gradient = take(rows, index)
            return
        if self.g_index is None:
            self.gradient = take(rows, self.row_index)
            return
        self.gradient, self.n_gradient_rows = take(rows, self.g_index), rows.shape[0]
        if self.placement.x_tokens.count > 1:
            own = rows.narrow(0, self.placement.x_tokens.index * self.n_rows, self.n_rows)
            self.gradient_of_x = take(own, self.row_index)

    def append_rows(self, other: Snapshot) -> None:
        """Join the rows of a later call of the same module in the same phase."""
        weights = torch.cat((self._absolute_weights(), other._absolute_weights()))
        self.x = torch.cat((self.single(self.x), other.single(other.x)))
        self.y = _joined(self, self.y, other, other.y)
        self.y_watched = _joined(self, self.y_watched, other, other.y_watched)
        self.n_rows += other.n_rows
        self.n_tile_rows, self.singles, self.weights = 0, None, weights

    def _absolute_weights(self) -> torch.Tensor:
        """float64 [rows of `single(x)`]: how many of the rows there were each stands for."""
        if self.singles is not None:
            return self.singles.weights()
        n = self.single(self.x).shape[0]
        alike = torch.full((n,), self.n_rows / max(n, 1), dtype=torch.float64, device=self.x.device)
        return alike if self.weights is None else self.weights

    def keep(self, kept: torch.Tensor) -> None:
        """Leave out the rows for which `kept`, bool [n_rows], is false; whole tiles are no longer told apart.

        Blocks of the forward GEMM lie within a row: leaving rows out changes no block.
        """
        sampled_frac = self.sampled_frac
        index = torch.arange(self.n_rows) if self.row_index is None else self.single(self.row_index)
        mask = kept[index]
        self.x = self.single(self.x)[mask]
        if self.y is not None and self.y_watched is not None:
            self.y, self.y_watched = self.single(self.y)[mask], self.single(self.y_watched)[mask]
        self.row_index, self.n_tile_rows = index[mask], 0
        self.singles = None if self.singles is None else self.singles.keep(mask)
        self.n_rows = max(round(self.x.shape[0] / sampled_frac), self.x.shape[0])

    def mark_ready(self) -> None:
        """Record, without waiting, the point of the current CUDA stream at which the copies are complete."""
        self.ready = event_now(self.x.device)

    def stack(self) -> Stack:
        """Return the copies as a stack of one; in the thread that measures."""
        w, x, tiles, g = self.weight, self.single(self.x)[None], self.tiled(self.x)[None], self.gradient
        of_rows = self.sampled_frac, x.shape[1] if self.row_index is None else _n_tiles(tiles)
        of_tiles = of_g_tiles = self.tile_frac, _n_tiles(tiles)
        of_g, y = of_rows, self.y
        if g is not None and self.g_index is not None:
            of_g = g.shape[0] / self.n_gradient_rows, g.shape[0]
            of_g_tiles = of_g[0], _n_tiles(g[None])
        if y is not None and w.bias is not None:
            y = y.double() - w.bias.double()
        return Stack(
            x=Sample(x, *of_rows, self.singles),
            g=None if g is None else Sample(self.single(g)[None], *of_g, self.singles_of_gradient),
            x_tiles=Sample(tiles, *of_tiles),
            g_tiles=None if g is None else Sample(self.tiled(g)[None], *of_g_tiles),
            y=None if y is None else self.single(y)[None],
            y_dtype=self.x.dtype if self.y is None else self.y.dtype,
            w_rows=w.rows[None],
            w_columns=w.columns[None],
            out_index=w.out_index,
            in_index=w.in_index,
            y_weights=self.row_weights(),
            has_same_tokens=self.g_index is None,
            x_of_g=None if self.x_of_gradient is None else self.x_of_gradient[None],
            g_of_x=None if self.gradient_of_x is None else self.gradient_of_x[None],
            placement=self.placement,
        )


def _n_tiles(rows: torch.Tensor) -> int:
    """How many 32-row tiles [1, R, C] has, a short last one too."""
    return -(-rows.shape[1] // TILE)


def _joined(first: Snapshot, a: torch.Tensor | None, second: Snapshot, b: torch.Tensor | None) -> torch.Tensor | None:
    return None if a is None or b is None else torch.cat((first.single(a), second.single(b)))


def event_now(device: torch.device) -> Any:
    """Record the point at which the device's current CUDA stream is; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
