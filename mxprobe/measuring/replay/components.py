"""The parts of a rounding error that are propagated one by one: scale, deadzone and grid, whose sum is the total."""

from __future__ import annotations

import torch

from mxprobe.schema import COMPONENTS
from mxprobe_kernels.torch_backend import ErrorFields

N_PARTS = len(COMPONENTS) - 1


def error_parts(fields: ErrorFields) -> torch.Tensor:
    """Return the scale, deadzone and grid part of the rounding error of x [rows, C], float32 [3, rows, C]."""
    return torch.stack((fields.e_scale, fields.e_dz, fields.e_grid)).float()


def with_total(parts: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Put the sum of the first three before them, along an axis of three or more."""
    return torch.cat((parts.narrow(dim, 0, N_PARTS).sum(dim, keepdim=True), parts), dim)
