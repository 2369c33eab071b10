"""One GEMM by the matrices of a parameter, as it was called: [S, K] x [E, O, K] -> [S, O]."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Shape = Callable[[torch.Tensor], torch.Tensor]


class Gemm(NamedTuple):
    """y = x W_e^T (+ bias) for the rows of one expert or of several."""

    expert: int | None
    """The expert of all rows; None where `experts` or `offsets` tell."""
    experts: torch.Tensor | None
    """int64 [S]: the expert of each row, in any order."""
    offsets: torch.Tensor | None
    """int [E], on the device: where the rows of each expert end, in order of experts. Where all three are None the
    rows are E equal parts."""
    x: torch.Tensor
    """[S, K], as the GEMM was given it."""
    is_flipped: bool
    """The parameter holds W^T, by its strides ..."""
    is_copy: bool
    """... or by those of a copy, which may have been transposed on the way."""
    n_features: int
    """O"""
    bias: torch.Tensor | None
    """[O] that y contains, where the call was given it."""
    output: torch.Tensor
    """What the call returned; its gradient has its shape."""
    rows_of: Shape
    """That shape -> [S, O]."""
