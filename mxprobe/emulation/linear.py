"""The three GEMMs of a Linear or of an attention product, each with its own quantized operands.

    forward    Y  = Q(X) Q(W)^T + b        blocks along in-features
    dgrad      dX = Q(G) Q(W)              blocks along out-features
    wgrad      dW = Q(G)^T Q(X)            blocks along tokens

Q passes gradients straight through: dX and dW are those of the Linear, at quantized operands. db is exact.
Shapes: X [..., in], W [out, in], G and Y [..., out]; tokens are all leading axes, flattened. X [..., T, K] and
W [..., S, K] of an attention product are batches of matrices, each a GEMM of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mxprobe.emulation.quantizer import quantize
from mxprobe.emulation.recipe import Recipe
from mxprobe_kernels.recipe_grammar import Operand

# Not F.linear, which a module's interception (see `modules`) would quantize a second time.
_linear = torch.ops.aten.linear.default


class Plan(NamedTuple):
    """The six operands of one module. A tuple of constants, which is what torch.compile can carry."""

    x_fwd: Operand
    w_fwd: Operand
    g_dgrad: Operand
    w_dgrad: Operand
    g_wgrad: Operand
    x_wgrad: Operand

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        return cls(**recipe.operands)


def emulated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan, salt: int = 0
) -> torch.Tensor:
    """Return F.linear(x, weight, bias) with the operands of all three GEMMs quantized; dtype and shape as F.linear's.

    A weight [..., S, K] of more than two axes has the leading axes of x [..., T, K]: the result is [..., T, S]. Under
    autocast the operands are cast first, as F.linear would, and quantized after. `salt` (a multiple of 16) selects the
    draw of stochastic rounding. Can be differentiated once.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _EmulatedLinear.apply(x, weight, bias, plan, salt)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan, salt: int
    ) -> torch.Tensor:
        # The operands themselves are saved, not their quantized copies: no memory is added, and a sharded weight
        # is gathered again for the backward as it would be without us.
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.salt = plan, salt
        if weight.dim() == 2:
            quantized_x = quantize(x, plan.x_fwd, dim=-1, salt=salt)
            return _linear(quantized_x, quantize(weight, plan.w_fwd, dim=-1, salt=salt + 1), bias)
        return _by_matrix(x, plan.x_fwd, -1, salt) @ _by_matrix(weight, plan.w_fwd, -1, salt + 1).transpose(-2, -1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's stub hides its parameters)
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[Any, ...]:
        (g,) = grad_outputs
        x, weight = ctx.saved_tensors
        plan, salt = ctx.plan, ctx.salt
        _refuse_double_backward("Linear" if weight.dim() == 2 else "attention product")
        tokens = x
        if weight.dim() == 2:
            tokens, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            w = _by_matrix(weight, plan.w_dgrad, -1 if plan.w_dgrad.as_forward else -2, salt + 2)
            dx = (_by_matrix(g, plan.g_dgrad, -1, salt + 3) @ w).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            t = _by_matrix(tokens, plan.x_wgrad, -1 if plan.x_wgrad.as_forward else -2, salt + 4)
            dw = _by_matrix(g, plan.g_wgrad, -2, salt + 5).transpose(-2, -1) @ t
        if ctx.needs_input_grad[2]:
            db = g.sum(0)
        return dx, dw, db, None, None


def _by_matrix(x: torch.Tensor, operand: Operand, dim: int, salt: int) -> torch.Tensor:
    """Quantize x [..., M, K]; square blocks, which take every leading axis as rows, reach into no other matrix."""
    if not operand.square or x.dim() == 2:
        return quantize(x, operand, dim=dim, salt=salt)
    matrices = x.reshape(-1, *x.shape[-2:])
    parts = [quantize(matrix, operand, dim=dim, salt=salt + 16 * i) for i, matrix in enumerate(matrices)]
    return torch.stack(parts).reshape(x.shape)


def _refuse_double_backward(what: str) -> None:
    """Raise RuntimeError where a backward is itself to be differentiated (create_graph=True)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"an emulated {what} cannot be differentiated twice: the straight-through gradient of a rounded "
            "operand has no derivative; remove the emulation, or use recipe 'none', for a double backward"
        )
