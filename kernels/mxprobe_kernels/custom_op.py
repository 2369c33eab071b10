"""The statistics as one operator of torch, `mxprobe::accumulate`, for hooks inside graphs that torch.compile traces.

    slots[index] <- slots[index] + statistics(x)          amax: the larger

A graph calls it and does not look into it: no graph break, whichever backend runs underneath. Importing this module
registers the operator with torch, which cannot be undone; the agent in a user's process does not import it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from mxprobe_kernels.decomposition import AMAX_INDEX, N_VALUES
from mxprobe_kernels.frontend import decompose


def new_slots(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return zeros, float64 [n, N_VALUES], for `accumulate`; row i becomes `Decomposition(slots[i], ...)`.

    Make them once, outside of any graph.
    """
    return torch.zeros((n, N_VALUES), dtype=torch.float64, device=device)


@torch.library.custom_op("mxprobe::accumulate", mutates_args=("slots",))
def accumulate(
    x: torch.Tensor,
    slots: torch.Tensor,
    index: int,
    format: str = "mxfp4",
    rule: str = "rceil",
    dim: int = -1,
    backend: str = "auto",
    enabled: torch.Tensor | None = None,
) -> None:
    """Add the statistics of x to row `index` of slots, float64 [n, N_VALUES] on the device of x.

    Pass `x.detach()`: there is nothing to differentiate. Never synchronises, allocates no slot, and may be captured
    into a CUDA graph once the same call has run outside of one (`warm_up`); what it allocates then is the graph's own.
    `enabled`: int32 [1] on the device; a replay while it holds 0 adds nothing and does not read x, but for its amax of
    a format with a scale for the tensor or for squares. ValueError as for `decompose`, and where slots do not fit.
    """
    if slots.shape[1:] != (N_VALUES,) or slots.dtype != torch.float64 or slots.device != x.device:
        raise ValueError(f"slots must be float64 [n, {N_VALUES}] on {x.device}; make them with new_slots()")
    values = decompose(x, format=format, rule=rule, dim=dim, backend=backend, enabled=enabled).values
    slot = slots[index]
    amax = torch.maximum(slot[AMAX_INDEX], values[AMAX_INDEX])
    slot.add_(values)
    slot[AMAX_INDEX].copy_(amax)


@accumulate.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None


def warm_up(
    device: torch.device | str,
    *,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    formats: Sequence[str] = ("mxfp4",),
    rules: Sequence[str] = ("rceil",),
    dims: Sequence[int] = (-1, 0),
    backend: str = "auto",
) -> int:
    """Run every combination once on zeros, so that a capture or a first step meets no compiler; return their number.

    Kernels depend on dtype, format, rule and direction, and on which sizes are multiples of 16 or of a tile: pass the
    shapes that will be captured. With a flag that is down and without one, as both are kernels of their own.
    """
    count = 0
    for shape, dtype, format, rule, dim in itertools.product(shapes, dtypes, formats, rules, dims):
        x = torch.zeros(shape, dtype=dtype, device=device)
        slots = new_slots(1, x.device)
        accumulate(x, slots, 0, format, rule, dim, backend)
        accumulate(x, slots, 0, format, rule, dim, backend, torch.zeros(1, dtype=torch.int32, device=x.device))
        count += 1
    return count
