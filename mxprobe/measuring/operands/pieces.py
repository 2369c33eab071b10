"""How much of a stack [E, M, C] one operation handles."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_BATCH_ELEMENTS = 1 << 16
"""On a CPU, elements handled by one operation: enough to hide its overhead, few enough for the cache."""
DEVICE_BATCH_ELEMENTS = 1 << 18
"""There what an operation makes is to stay small: 8 to 100 bytes each."""


def on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def batch_elements(x: torch.Tensor) -> int:
    return CPU_BATCH_ELEMENTS if on_host(x) else DEVICE_BATCH_ELEMENTS


def pieces(x: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(experts, rows) of [E, M, C] to be handled by one operation each; sums add up over them.

    As many experts as there is room for; on a device as many rows of a large one, on a CPU all of them.
    """
    n, height, width = x.shape
    experts = max(batch_elements(x) // max(height * width, 1), 1)
    rows = max(height if on_host(x) or experts > 1 else batch_elements(x) // max(width, 1), 1)
    for e in range(0, n, experts):
        for r in range(0, max(height, 1), rows):
            yield slice(e, e + experts), slice(r, r + rows)
