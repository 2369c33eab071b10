"""Q(x) of one operand by `mxprobe_kernels`, opaque to torch.compile."""

from __future__ import annotations

import torch

from mxprobe_kernels.corrections import quantize_operand
from mxprobe_kernels.recipe_grammar import Operand


def quantize(x: torch.Tensor, operand: Operand, *, dim: int, salt: int = 0) -> torch.Tensor:
    """Return x as its GEMM receives it: quantized and dequantized in blocks along `dim`, shaped and typed like x.

    x: floating point, any shape; square blocks take all axes but the last as rows. `salt` selects the draw of
    stochastic rounding, which is a function of salt, position and value alone, so that recomputed activations are
    rounded alike and no random generator is touched. Records nothing for autograd.
    """
    if operand.is_high_precision:
        return x.detach()
    if torch.compiler.is_compiling():
        return _quantize_op(x, str(operand), dim, salt)
    return quantize_operand(x, operand, dim=dim, salt=salt, dtype=x.dtype)


@torch.library.custom_op("mxprobe::quantize_operand", mutates_args=())
def _quantize_op(x: torch.Tensor, operand: str, dim: int, salt: int) -> torch.Tensor:
    return quantize_operand(x, Operand.parse(operand), dim=dim, salt=salt, dtype=x.dtype).contiguous()


@_quantize_op.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
