"""Do the optimizer's updates reach the quantized policy? Two or three consecutive versions of a weight compared.

    dW = W_t - W_(t-1)      dQ = Q(W_t) - Q(W_(t-1))        on the watched output features (`weights`)

An update smaller than the distance to the next rounding boundary changes no code, and one that crosses it changes the
policy by a whole grid step: what arrives is dQ. An element that goes back to the value it had one version earlier
oscillates (TetraJet, arXiv 2502.20853: R_w = sum |dQ| / sum |dW| over a window; elements near a boundary are those that
will). Ratios are derived in `mxprobe.attribution.update_visibility`.
"""

from __future__ import annotations

import torch

import mxprobe_kernels
from mxprobe.schema import Row
from mxprobe_kernels.formats import E2M1_GRID
from mxprobe_kernels.torch_backend import ErrorFields

NEAR = 0.1
"""Share of a grid step: elements so close to a rounding boundary are counted as near it."""


@torch.no_grad()
def update_row(earlier: torch.Tensor | None, before: torch.Tensor, now: torch.Tensor, *, rule: str = "rceil") -> Row:
    """Return a row of table `updates` from weights [F, K] of consecutive versions, `earlier` the first if there is one.

    Quantized as MXFP4 under `rule`, blocks along K. Blocks with a NaN or an infinity count as unchanged.
    """
    old, new = (mxprobe_kernels.error_fields(w, rule=rule) for w in (before, now))
    usable = (before.isfinite() & now.isfinite()).all(-1, keepdim=True)
    d_w, d_q = (new.x - old.x) * usable, (new.q - old.q) * usable
    flipped = d_q != 0
    returned = torch.zeros_like(flipped)
    if earlier is not None:
        returned = flipped & (new.q == mxprobe_kernels.error_fields(earlier, rule=rule).q)
    n = now.numel()
    recoded = (new.code != old.code) & ((new.q != 0) | (old.q != 0)) & usable  # +0 and -0 are one value
    counts = torch.stack((flipped, recoded, returned, near_boundary(old))).flatten(1).sum(1)
    products = (old.x.square(), d_w.square(), d_q.square(), d_w * d_q, d_w.abs(), d_q.abs())
    sums = torch.stack([each.sum() for each in products])
    names = ("sum_w2", "sum_dw2", "sum_dq2", "sum_dw_dq", "sum_abs_dw", "sum_abs_dq")
    counted = ("n_flipped", "n_code_flipped", "n_returned", "n_near")
    return {
        "n": n,
        **dict(zip(counted, counts.tolist())),
        "n_returnable": n if earlier is not None else 0,
        **dict(zip(names, sums.tolist())),
    }


def near_boundary(fields: ErrorFields) -> torch.Tensor:
    """Return bool, shaped like x: within `NEAR` of a grid step of a boundary between two values of the block's grid."""
    rows, width = fields.x.shape
    scale = fields.scales.scale.reshape(rows, -1).repeat_interleave(fields.format.block, 1)[:, :width]
    z = (fields.x / scale).abs()
    near = torch.zeros_like(z, dtype=torch.bool)
    for low, high in zip(E2M1_GRID, E2M1_GRID[1:]):
        near |= (z - (low + high) / 2).abs() < NEAR * (high - low)
    return near
