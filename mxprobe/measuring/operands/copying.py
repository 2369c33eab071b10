"""One call of a module -> a snapshot: copies of the sampled rows of its operands and of its output."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mxprobe.measuring.adapters.adapter import Reading
from mxprobe.measuring.adapters.placement import Placement
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import WeightSample
from mxprobe.measuring.sampling import TILE, Rows, row_norms, sample_singles, sample_tiles, take
from mxprobe.schema import Phase

CPU_MAX_ROWS = 128
"""Rows measured where a CPU does it: about 25 ms for the six operands of a 64 x 64 Linear and eleven corrections."""
MAX_ELEMENTS = 1 << 24
"""Elements of one copied operand, over which rows of very wide modules are sampled."""


def snapshot_of(
    reading: Reading,
    weight: WeightSample,
    *,
    module: str,
    phase: Phase,
    step: int,
    micro_step: int,
    seed: int,
    max_rows: int,
    with_operands: bool = True,
    with_weights: bool = True,
    token_group: str = "",
) -> Snapshot:
    """Copy the sampled rows of a call; call it `undisturbed`, in the thread of the call.

    `token_group`: see `Placement`. The gradient is added later, by `Snapshot.add_gradient`.
    """
    x, placement = reading.x, reading.placement.within(token_group)
    how: dict[str, int] = {"max_rows": max_rows, "out_features": weight.columns.shape[0], "seed": seed}
    alike = placement.x_tokens.count == placement.g_tokens.count
    chosen = choose_rows(x, **how) if alike else Chosen(choose_tiles(x, **how))
    index = chosen.index
    y, y_watched = copied_outputs(reading.y, weight, index)
    g_index, x_of_gradient = _rows_of_gradient(reading, placement, max_rows, seed)
    return Snapshot(
        module=module,
        phase=phase.value,
        step=step,
        micro_step=micro_step,
        time_ns=time.time_ns(),
        n_rows=n_rows(x),
        row_index=index,
        x=_operand(reading, take(x.detach().reshape(-1, x.shape[-1]), index)),
        y=y,
        y_watched=y_watched,
        weight=weight,
        with_operands=with_operands,
        with_weights=with_weights,
        n_tile_rows=chosen.n_tile_rows,
        singles=chosen.singles,
        placement=placement,
        g_index=g_index,
        x_of_gradient=x_of_gradient,
    )


def _rows_of_gradient(
    reading: Reading, placement: Placement, max_rows: int, seed: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (rows of G to copy, X at these rows) where G has other rows than X; (None, None) where it has the same."""
    shards, output = (placement.x_tokens, placement.g_tokens), reading.output
    if output is None or shards[0].count == shards[1].count:
        return None, None
    n_g = n_rows(output)
    index = choose_tiles(output, max_rows=max_rows, out_features=output.shape[-1], seed=seed)
    rows_of_g = torch.arange(n_g, device=output.device) if index is None else index
    if placement.g_tokens.count == 1:
        return rows_of_g, None
    x = reading.x.detach().reshape(-1, reading.x.shape[-1]).narrow(0, placement.g_tokens.index * n_g, n_g)
    return rows_of_g, _operand(reading, take(x, index))


def _operand(reading: Reading, rows: torch.Tensor) -> torch.Tensor:
    return rows if reading.operand is None else reading.operand(rows).clone()


def n_rows(x: torch.Tensor) -> int:
    """Return how many rows x [..., K] has."""
    return x.numel() // x.shape[-1]


def copied_outputs(
    y: torch.Tensor | None, weight: WeightSample, index: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Copy y at the sampled rows: its sampled output features, and its watched ones."""
    if y is None:
        return None, None
    whole = y.detach().reshape(-1, y.shape[-1])
    sampled = take(whole if weight.out_index is None else whole.index_select(1, weight.out_index), index)
    if weight.watched is weight.rows:
        return sampled, sampled
    return sampled, take(whole.index_select(1, weight.watched_index), index)


@dataclass(frozen=True)
class Chosen:
    """Rows to copy: int64, whole tiles and behind them single rows; None for all."""

    index: torch.Tensor | None
    n_tile_rows: int = 0
    singles: Rows | None = None


def choose_rows(x: torch.Tensor, *, max_rows: int, out_features: int, seed: int) -> Chosen:
    """Choose the rows of x [..., K] to copy."""
    n, limit = n_rows(x), _row_limit(x, max_rows, out_features)
    if n <= max(limit, TILE):
        return Chosen(None)
    each = limit if x.device.type == "cpu" else limit // 2
    tiles = sample_tiles(n, each, seed=seed, device=x.device)
    singles = sample_singles(row_norms(x.reshape(-1, x.shape[-1])), each, seed=seed)
    if tiles is None or singles is None:
        return Chosen(tiles)
    return Chosen(torch.cat((tiles, singles.index)), tiles.shape[0], singles)


def choose_tiles(x: torch.Tensor, *, max_rows: int, out_features: int, seed: int) -> torch.Tensor | None:
    """Choose whole tiles of the rows of x [..., K]; None for all rows."""
    return sample_tiles(n_rows(x), _row_limit(x, max_rows, out_features), seed=seed, device=x.device)


def _row_limit(x: torch.Tensor, max_rows: int, out_features: int) -> int:
    limit = min(max_rows, MAX_ELEMENTS // max(x.shape[-1], out_features))
    return min(limit, CPU_MAX_ROWS) if x.device.type == "cpu" else limit
