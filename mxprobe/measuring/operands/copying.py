"""One call of a module -> a snapshot: copies of the sampled rows of its operands and of its output."""

from __future__ import annotations

import time

import torch

from mxprobe.measuring.adapters.adapter import Reading
from mxprobe.measuring.adapters.placement import Placement
from mxprobe.measuring.operands.snapshot import Chosen, Snapshot, choose_rows, choose_tiles, copied_outputs
from mxprobe.measuring.operands.weights import WeightSample
from mxprobe.measuring.sampling import take
from mxprobe.schema import Phase


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
    """(rows of G to copy, X at these rows) where G has other rows than X; (None, None) where it has the same."""
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
    """Rows of x [..., K]."""
    return x.numel() // x.shape[-1]
