"""What probing one module takes of its device: copies until they are measured, and what measuring makes of them.

    copies  = rows of X, Y, G in two phases, and the sampled features of W, with gradient and without
    working = 30 sum of E + 120 max E + 100 DEVICE_BATCH_ELEMENTS        bytes, E the elements of one of six operands

The second line was measured operator by operator: `tests/unit/test_agent_memory.py` holds it to be an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mxprobe.measuring.operands.pieces import DEVICE_BATCH_ELEMENTS
from mxprobe.measuring.sampling import TILE

BYTES_HELD = 30
"""An element of an operand takes so many until the last product with it: x, Q, Q* in float64, masks and codes."""
BYTES_PASSING = 120
"""An element takes so many more while its operand is quantized or corrected."""
BYTES_OF_BATCH = 100


@dataclass
class Extent:
    """How much of a GEMM with weight [O, K] is sampled. All sizes are upper bounds."""

    out_features: int
    in_features: int
    element_bytes: int
    max_rows: int
    max_features: int

    @property
    def sample_bytes(self) -> int:
        """Bytes that one armed step copies."""
        rows = 2 * self.max_rows * (self.in_features + 2 * self.out_features)
        return (rows + 2 * (self._rows_of_w + self._columns_of_w)) * self.element_bytes

    @property
    def working_bytes(self) -> int:
        """Bytes that measuring the copies takes for itself, on a device, while it lasts."""
        tokens, rows, columns = self.max_rows, self._rows_of_w, self._columns_of_w
        by_token = tokens * self.in_features, tokens * self.out_features
        by_feature = (
            tokens * min(self.max_features, self.out_features),
            tokens * min(self.max_features, self.in_features),
        )
        return working_bytes((*by_token, rows, columns, *by_feature))

    @property
    def _rows_of_w(self) -> int:
        return min(self.out_features, self.max_features) * self.in_features

    @property
    def _columns_of_w(self) -> int:
        return min(self.in_features, self.max_features) * self.out_features

    def shrink(self, max_bytes: int) -> bool:
        """Sample fewer rows and features, so that both together fit; return whether that was needed."""
        before = self.max_rows, self.max_features
        while self.sample_bytes + self.working_bytes > max_bytes and max(self.max_rows, self.max_features) > TILE:
            self.max_rows = max(self.max_rows // 2, TILE)
            self.max_features = max(self.max_features // 2, TILE)
        return before != (self.max_rows, self.max_features)


def working_bytes(elements: tuple[int, ...]) -> int:
    """Return the bytes that measuring takes; `elements` counts those of each operand."""
    return BYTES_HELD * sum(elements) + BYTES_PASSING * max(elements) + BYTES_OF_BATCH * DEVICE_BATCH_ELEMENTS


def element_bytes(module: nn.Module) -> int:
    """Return the bytes of an element of X, Y, G and W, by the module's own parameters."""
    kinds = {p.dtype for p in module.parameters(recurse=False)}
    return 2 if kinds and kinds <= {torch.bfloat16, torch.float16} else 8 if torch.float64 in kinds else 4
