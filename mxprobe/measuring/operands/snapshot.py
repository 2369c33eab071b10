"""Copies of one Linear call, taken in the training thread and measured later in ours.

R = rows (tokens, flattened over batch and sequence), K = in features, O = out features; _s = sampled.

Where rows are sampled there are two samples, one behind the other: whole 32-token tiles, for the products whose blocks
run along tokens, and single rows, the largest always among them, for all else (`mxprobe.measuring.sampling`). The
single rows of G are those of its own largest, not of X's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxprobe.measuring.adapters.placement import WHOLE, Placement
from mxprobe.measuring.operands.weights import WeightSample
from mxprobe.measuring.sampling import TILE, Rows, row_norms, sample_singles, sample_tiles, seed_of, take

CPU_MAX_ROWS = 128
"""Rows measured where a CPU does it: about 25 ms for the six operands of a 64 x 64 Linear and eleven corrections."""
MAX_ELEMENTS = 1 << 24
"""Elements of one copied operand, over which rows of very wide modules are sampled."""


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
        """Return the columns that every row of it has."""
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
        return self.single(self.x).shape[0] / self.n_rows

    @property
    def tile_frac(self) -> float:
        return self.tiled(self.x).shape[0] / self.n_rows

    @property
    def n_tiles(self) -> int:
        return -(-self.tiled(self.x).shape[0] // TILE)

    def tiled(self, rows: torch.Tensor) -> torch.Tensor:
        """Of copied rows (of x, y or the gradient) the whole tiles."""
        return rows[: self.n_tile_rows] if self.n_tile_rows else rows

    def single(self, rows: torch.Tensor) -> torch.Tensor:
        """Of copied rows those that stand for all by their weights."""
        return rows[self.n_tile_rows :]

    def row_weights(self) -> torch.Tensor | None:
        """float64 [rows of `single(x)`], at most 1: what each counts; None where all count 1."""
        weights = self.weights if self.singles is None else self.singles.weights()
        return None if weights is None else weights / weights.max()

    def add_gradient(self, gradient: torch.Tensor) -> None:
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


def _joined(first: Snapshot, a: torch.Tensor | None, second: Snapshot, b: torch.Tensor | None) -> torch.Tensor | None:
    return None if a is None or b is None else torch.cat((first.single(a), second.single(b)))


def copied_outputs(
    y: torch.Tensor | None, weight: WeightSample, index: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Copies of y at the sampled rows: of the sampled output features, and of the watched ones."""
    if y is None:
        return None, None
    whole = y.detach().reshape(-1, y.shape[-1])
    sampled = take(whole if weight.out_index is None else whole.index_select(1, weight.out_index), index)
    if weight.watched is weight.rows:
        return sampled, sampled
    return sampled, take(whole.index_select(1, weight.watched_index), index)


def event_now(device: torch.device) -> Any:
    """The current point of the device's current CUDA stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@dataclass(frozen=True)
class Chosen:
    """Rows to copy: int64, whole tiles and behind them single rows; None for all."""

    index: torch.Tensor | None
    n_tile_rows: int = 0
    singles: Rows | None = None


def choose_rows(x: torch.Tensor, *, max_rows: int, out_features: int, seed: int) -> Chosen:
    """Of [..., K]."""
    n, limit = x.numel() // x.shape[-1], _row_limit(x, max_rows, out_features)
    if n <= max(limit, TILE):
        return Chosen(None)
    each = limit if x.device.type == "cpu" else limit // 2
    tiles = sample_tiles(n, each, seed=seed, device=x.device)
    singles = sample_singles(row_norms(x.reshape(-1, x.shape[-1])), each, seed=seed)
    if tiles is None or singles is None:
        return Chosen(tiles)
    return Chosen(torch.cat((tiles, singles.index)), tiles.shape[0], singles)


def choose_tiles(x: torch.Tensor, *, max_rows: int, out_features: int, seed: int) -> torch.Tensor | None:
    """Indices of whole tiles of the rows of [..., K]; None for all."""
    return sample_tiles(x.numel() // x.shape[-1], _row_limit(x, max_rows, out_features), seed=seed, device=x.device)


def _row_limit(x: torch.Tensor, max_rows: int, out_features: int) -> int:
    limit = min(max_rows, MAX_ELEMENTS // max(x.shape[-1], out_features))
    return min(limit, CPU_MAX_ROWS) if x.device.type == "cpu" else limit
