"""The statistics as one operator of torch, `mxprobe::accumulate`, for hooks inside graphs that torch.compile traces.

    slots[index] <- slots[index] + statistics(x)          amax: the larger

A graph calls it and does not look into it: no graph break, whichever backend runs underneath. Importing this module
registers the operator with torch, which cannot be undone; the agent in a user's process does not import it.
"""

from __future__ import annotations

import torch

from mxprobe_kernels.decomposition import AMAX_INDEX, N_VALUES
from mxprobe_kernels.frontend import decompose


def new_slots(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """float64 [n, N_VALUES] of zeros, made once, outside of any graph; row i becomes `Decomposition(slots[i], ...)`."""
    return torch.zeros((n, N_VALUES), dtype=torch.float64, device=device)


@torch.library.custom_op("mxprobe::accumulate", mutates_args=("slots",))
def accumulate(
    x: torch.Tensor, slots: torch.Tensor, index: int, format: str = "mxfp4", rule: str = "rceil", dim: int = -1
) -> None:
    """Add the statistics of x to row `index` of slots, float64 [n, N_VALUES] on the device of x.

    Pass `x.detach()`: there is nothing to differentiate. Never synchronises, allocates no slot. ValueError as for
    `decompose`, and where slots do not fit.
    """
    if slots.shape[1:] != (N_VALUES,) or slots.dtype != torch.float64 or slots.device != x.device:
        raise ValueError(f"slots must be float64 [n, {N_VALUES}] on {x.device}; make them with new_slots()")
    values = decompose(x, format=format, rule=rule, dim=dim).values
    slot = slots[index]
    amax = torch.maximum(slot[AMAX_INDEX], values[AMAX_INDEX])
    slot.add_(values)
    slot[AMAX_INDEX].copy_(amax)


@accumulate.register_fake
def _(
    x: torch.Tensor, slots: torch.Tensor, index: int, format: str = "mxfp4", rule: str = "rceil", dim: int = -1
) -> None:
    return None
