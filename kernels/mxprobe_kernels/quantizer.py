"""Blocks -> Q, by the CPU library where it can, else by the torch path: the same bits either way. Shipped."""

from __future__ import annotations

import torch

from mxprobe_kernels import cpu_quantizer, torch_backend
from mxprobe_kernels.blocks import from_blocks, per_block, to_blocks
from mxprobe_kernels.formats import Format, Rule, get_format, get_rule


def quantized(
    blocks: torch.Tensor, format: Format, rule: Rule, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q of blocks, float32 [R, N, B], in `dtype`, and exponents of power-of-two scales, int32 [R, N, 1].

    Q is NaN in excluded blocks. It is rounded once, from float64. In float32 it is exact for power-of-two
    scales, but an infinity past its range.
    """
    if dtype in (torch.float32, torch.float64) and cpu_quantizer.supports(blocks):
        tensor_amax = torch_backend.finite_amax(blocks) if format.tensor_scale else None
        return cpu_quantizer.quantize(blocks, format, rule, tensor_amax, dtype)
    q, scales = torch_backend.quantized_blocks(blocks, format, rule)
    return q.to(dtype), scales.exponent


@torch.no_grad()
def quantize_dequantize(
    x: torch.Tensor,
    *,
    format: str | Format = "mxfp4",
    rule: str | Rule = "rceil",
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q(x), shaped like x, in `dtype` or x's own, and exponents of power-of-two scales, int32, one per block.

    A block with a NaN or an infinity is NaN throughout, as E8M0's NaN scale makes it, and has exponent -127. A Q past
    the range of the dtype is an infinity (float32 amax in (6 - 1/2, 6] * 2^125 and up, float16 at 65536). ValueError as
    for `decompose`.
    """
    format, rule = get_format(format), get_rule(rule)
    blocks, shape = to_blocks(x, dim, format.block, format.block_rows)
    dtype = dtype or x.dtype
    q, exponent = quantized(blocks, format, rule, dtype if dtype == torch.float32 else torch.float64)
    return from_blocks(q.to(dtype), shape), per_block(exponent.squeeze(-1), shape)
