"""What the sums of an operand do not tell: how peaked its blocks are, where its error lies, whether both axes agree.

    crest_b = m_b / rms_b      underflow_b = elements of block b with Q = 0, x != 0 / its elements
    E_c = sum over rows of e_rc^2        channels c along the contraction axis; top k %: the largest E_c, at least one
    sparse k %: the elements with the largest e_rc^2 of each row, at least one
    transposed: ||Q_row(W) - Q_col(W)||^2, W quantized along its rows as the forward has it and along its columns as dX
    has it, on the elements that were measured both ways

Sums over blocks that are not all zero, so that `mxprobe.attribution.neighbours` can add steps, divide and correlate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mxprobe.schema import Row
from mxprobe_kernels.corrections import channels_of
from mxprobe_kernels.torch_backend import ErrorFields

TOP_PERCENT = (1, 5, 10)
_NAMES = ("sum_crest", "sum_crest2", "sum_underflow", "sum_underflow2", "sum_crest_underflow")


@torch.no_grad()
def block_row(fields: ErrorFields, weights: torch.Tensor | None = None) -> Row:
    """Values of a row of table `blocks` for an operand [..., C]; a short last block counts its own elements.

    `weights` float64 [rows]: what each row counts; None where all count 1.
    """
    width, size = fields.x.shape[-1], fields.format.block
    pad = (0, -width % size)
    x = F.pad(fields.x.flatten(0, -2), pad).unflatten(1, (-1, size))
    zeroed = F.pad(fields.zeroed.flatten(0, -2), pad).unflatten(1, (-1, size))
    n = torch.full((x.shape[1],), float(size), device=x.device, dtype=x.dtype)
    if width % size:
        n[-1] = width % size
    amax = x.abs().amax(-1)
    used = amax > 0
    w = torch.ones_like(x[:, 0, 0]) if weights is None else weights.to(x.dtype)
    # Relative to the maximum first: squares of very small numbers vanish.
    rms = (x / torch.where(used, amax, 1.0)[..., None]).square().sum(-1).div(n).sqrt()
    crest = torch.where(used, 1.0 / torch.where(used, rms, 1.0), 0.0)
    underflow = zeroed.sum(-1).to(x.dtype) / n * used
    pairs = torch.stack((crest, crest.square(), underflow, underflow.square(), crest * underflow))
    e2 = fields.e.square().flatten(0, -2)
    channels = (w @ e2).sort(descending=True).values
    tops = [channels[: channels_of(k, width)].sum() for k in TOP_PERCENT]
    kept = [channels_of(k, width) for k in TOP_PERCENT]
    largest = e2.topk(max(kept) if width else 0, dim=1).values
    sparse = [(largest[:, :n].sum(1) * w).sum() for n in kept]
    n_used = (used.sum(1) * w).sum()
    totals = torch.stack((n_used, channels.sum(), *tops, *sparse))
    values = torch.cat(((pairs * w[:, None]).flatten(1).sum(1), totals)).tolist()
    kinds = [f"sum_e2_{kind}{k}" for kind in ("top", "sparse") for k in TOP_PERCENT]
    sums = dict(zip((*_NAMES, "n_blocks", "sum_e2", *kinds), values))
    return {**sums, "n_blocks": round(sums["n_blocks"]), **NOT_TRANSPOSED}


NOT_TRANSPOSED: Row = {"sum_transposed2": None, "sum_tile2": None}
"""The columns for an operand that was not measured along both axes."""


@torch.no_grad()
def transposition_row(
    rows: ErrorFields, columns: ErrorFields, out_index: torch.Tensor | None, in_index: torch.Tensor | None
) -> Row:
    """Values beside a weight's `block_row`.

    `rows` are of W[out_index] [..., O_s, K], `columns` of W[:, in_index]^T [..., K_s, O].
    """
    by_row = rows.q if in_index is None else rows.q.index_select(-1, in_index)
    by_column = columns.q if out_index is None else columns.q.index_select(-1, out_index)
    tile = rows.x if in_index is None else rows.x.index_select(-1, in_index)
    sums = torch.stack(((by_row - by_column.mT).square().sum(), tile.square().sum())).tolist()
    return dict(zip(NOT_TRANSPOSED, sums))
