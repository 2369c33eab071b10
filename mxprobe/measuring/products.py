"""Products and inner products of stacks of matrices [E, M, N], one for each expert; a Linear is a stack of one.

A stack of one is multiplied as the matrix it is: batched kernels may add in another order.
"""

from __future__ import annotations

import torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A_e B_e, shape [E, M, N], of [E, M, C] and [E, C, N]."""
    return a @ (b[0] if b.dim() == 3 and len(b) == 1 else b)


def inner(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return <u_e, v_e>, shape [E], of [E, M, N]."""
    if len(u) == 1:
        return torch.dot(u.flatten(), v.flatten())[None]
    return (u * v).sum((1, 2))
