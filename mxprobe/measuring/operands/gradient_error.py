"""The error of a gradient product whose two operands are both quantized: exact on the rows at hand, and local.

    dW = G^T X     wgrad, contraction over tokens
    dX = G W       dgrad, contraction over out-features
    D_c = (L + E_L,c)(R + E_R,c)^T - L R^T          L [M, C], R [N, C], blocks along C, c a component or the total

Relative L2 ||D|| / ||L R^T||, cosine, log2 norm ratio and projection gain follow from ||L R^T||^2, ||D||^2 and their
inner product. A component is put in alone, in both operands: the parts do not add up, since e_scale and e_grid point
against each other.

For dW the tokens are cut in two halves as well, a + b = dW: their cosine says whether there is a gradient to be
wrong about, and ||a - b||^2 estimates the sampling noise of a + b.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxprobe.measuring.products import product
from mxprobe.measuring.sampling import TILE
from mxprobe.schema import Row
from mxprobe_kernels.torch_backend import ErrorFields

WGRAD, DGRAD = "wgrad", "dgrad"
_SUMS = ("ref2", "err2", "ref_err")
_HALVES = ("half_a2", "half_b2", "half_ab")
_NO_HALVES: Row = dict.fromkeys(_HALVES, float("nan"))


@torch.no_grad()
def gradient_error(gemm: str, left: ErrorFields, right: ErrorFields, *, in_halves: bool = True) -> Iterator[Row]:
    """One row of table `gradients` per component: its sums, `gemm` and `component`, without when and where.

    left [..., M, C], right [..., N, C]: the decomposition of the operands, C the contraction axis of the product;
    of several products (one per expert) the sums. `in_halves` is False where the tokens cannot be cut in two halves
    alike, as the few tokens of an expert.
    """
    exact = product(left.x, right.x.mT)
    halves = _halves(left.x, right.x, exact) if gemm == WGRAD and in_halves else _NO_HALVES
    parts = (
        ("total", left.e, right.e),
        ("scale", left.e_scale, right.e_scale),
        ("deadzone", left.e_dz, right.e_dz),
        ("grid", left.e_grid, right.e_grid),
    )
    for component, e_left, e_right in parts:
        error = product(e_left, (right.x + e_right).mT) + product(left.x, e_right.mT)
        values = torch.stack([_dot(exact, exact), _dot(error, error), _dot(exact, error)]).tolist()
        yield {"gemm": gemm, "component": component, **dict(zip(_SUMS, values)), **halves}


def _halves(left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> Row:
    """Sums of the two halves, in whole 32-token tiles; NaN where there is but one tile."""
    middle = left.shape[-1] // (2 * TILE) * TILE
    if middle == 0:
        return _NO_HALVES
    a = product(left[..., :middle], right[..., :middle].mT)
    b = exact - a
    return dict(zip(_HALVES, torch.stack([_dot(a, a), _dot(b, b), _dot(a, b)]).tolist()))


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a.flatten(), b.flatten())
