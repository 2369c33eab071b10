"""Takes the copies of one Linear call from what its module's adapter read; in the training thread, without waiting.

R_x = rows of X there are on this rank, R_g = rows of G, K = in features, O = out features; _s = sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxprobe.measuring.adapters.adapter import Reading
from mxprobe.measuring.adapters.placement import Placement
from mxprobe.measuring.operands.snapshot import Moment, Snapshot
from mxprobe.measuring.operands.weights import WeightSample
from mxprobe.measuring.sampling import TILE, Rows, row_norms, sample_singles, sample_tiles, seed_of, take

CPU_MAX_ROWS = 128
"""Rows measured where a CPU does it: about 25 ms for the six operands of a 64 x 64 Linear and eleven corrections."""
MAX_ELEMENTS = 1 << 24
"""Elements of one copied operand, over which rows of very wide modules are sampled."""


def copy_call(
    reading: Reading,
    weight: WeightSample,
    moment: Moment,
    *,
    max_rows: int,
    with_operands: bool,
    with_weights: bool,
    token_group: str = "",
) -> Snapshot:
    """Copy the sampled rows of a call's X and Y; the gradient is added later, by `Snapshot.add_gradient`.

    The moment's step and module give the seed of the sample. `weight` is what `sample_weight` copied for this step;
    `token_group` is explained at `Placement.within`. Callers enter `undisturbed` first.
    """
    x, seed = reading.x, seed_of(moment.step, moment.module)
    placement = reading.placement.within(token_group)
    how = {"max_rows": max_rows, "out_features": weight.columns.shape[0], "seed": seed}
    alike = placement.x_tokens.count == placement.g_tokens.count
    chosen = choose_rows(x, **how) if alike else Chosen(choose_tiles(x, **how))
    y, y_watched = copied_outputs(reading.y, weight, chosen.index)
    g_index, x_of_gradient = _rows_of_gradient(reading, placement, max_rows, seed)
    return Snapshot(
        **vars(moment),
        n_rows=row_count(x),
        row_index=chosen.index,
        x=_operand(reading, take(x.detach().reshape(-1, x.shape[-1]), chosen.index)),
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
    output = reading.output
    if output is None or placement.x_tokens.count == placement.g_tokens.count:
        return None, None
    n_g = row_count(output)
    index = choose_tiles(output, max_rows=max_rows, out_features=output.shape[-1], seed=seed)
    rows = torch.arange(n_g, device=output.device) if index is None else index
    if placement.g_tokens.count == 1:
        return rows, None
    x = reading.x.detach().reshape(-1, reading.x.shape[-1]).narrow(0, placement.g_tokens.index * n_g, n_g)
    return rows, _operand(reading, take(x, index))


def _operand(reading: Reading, rows: torch.Tensor) -> torch.Tensor:
    return rows if reading.operand is None else reading.operand(rows).clone()


def row_count(x: torch.Tensor) -> int:
    """Return how many rows [..., K] has."""
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
    n, limit = row_count(x), _row_limit(x, max_rows, out_features)
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
    return sample_tiles(row_count(x), _row_limit(x, max_rows, out_features), seed=seed, device=x.device)


def _row_limit(x: torch.Tensor, max_rows: int, out_features: int) -> int:
    limit = min(max_rows, MAX_ELEMENTS // max(x.shape[-1], out_features))
    return min(limit, CPU_MAX_ROWS) if x.device.type == "cpu" else limit
