"""What a tensor becomes under a correction, or under all that is done to an operand. Shipped.

Q is MXFP4 under the given scale rule; blocks of 32 along `dim`.

    rule:R               Q under rule R
    mbs:B                Q(f x) / f          f = 1 + m8 / 256, m8 the top 8 mantissa bits of fp32(6 / amax_B)
    of:alpha             Q(x) + alpha Q(x - Q(x))
    had:N                H^T Q(H x)          H a randomised, normalised Hadamard rotation of N elements
    sr                   Q with floor(. + U) for rounding to nearest: see `stochastic`; the first draw
    channels:k           Q(x), and Q(x) + Q(x - Q(x)) on the k % of channels with most ||x - Q(x)||^2
    nvfp4                16-blocks, E4M3 block scales, one fp32 scale for the tensor
    nvfp4_4over6         the same, each block's amax mapped to 6 or to 4, by squared error
    mxfp4_4over6         each block's scale by the rule or by `floor`, by squared error
    hif4                 HiFloat4: 64-blocks, three levels of scale
    mxfp6_e2m3, mxfp6_e3m2, mxfp8   wider elements, power-of-two scales by `rceil`
    keep_high_precision  x
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from mxprobe_kernels import stochastic
from mxprobe_kernels.blocks import from_blocks, pad_rows, rows_of, to_blocks
from mxprobe_kernels.formats import MXFP4, Rule, get_format, get_rule
from mxprobe_kernels.quantizer import quantize_dequantize, quantized
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind, Operand


def apply_correction(
    x: torch.Tensor, correction: str | Correction, *, rule: str | Rule = "rceil", dim: int = -1
) -> torch.Tensor:
    """Return x under a correction of MXFP4, quantized, dequantized and rotated or scaled back; float32, shaped like x.

    ValueError for an unknown correction or a parameter it cannot take; otherwise as `quantize_operand`.
    """
    return quantize_operand(x, Operand.from_correction(correction, get_rule(rule)), dim=dim)


@torch.no_grad()
def quantize_operand(
    x: torch.Tensor, operand: Operand, *, dim: int = -1, salt: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return x as its GEMM receives it, in `dtype`, shaped like x, with blocks along `dim`.

    x: float32, bfloat16, float16 or float64 (rounded to float32). Square blocks take all axes but the last as rows. A
    block with a NaN or an infinity comes back as NaN. The random signs of `had:N` come from a fixed seed of their own,
    so that two tensors that meet in a GEMM are rotated alike. `salt` selects the draw of stochastic rounding.
    """
    if operand.is_high_precision:
        rows_of(x, dim)
        return x.detach().to(dtype)
    format, rule = get_format(operand.format), operand.rule
    if operand.square:
        format, dim = replace(format, block_rows=format.block), -1
    if operand.stochastic:
        return stochastic.quantize(x, format, rule, dim, salt=salt, dtype=dtype)
    if operand.corrections:
        return _corrected(x, operand.corrections, rule, dim).to(dtype)
    return quantize_dequantize(x, format=format, rule=rule, dim=dim, dtype=dtype)[0]


def _corrected(x: torch.Tensor, corrections: tuple[Correction, ...], rule: Rule, dim: int) -> torch.Tensor:
    """`of` on top of M: M(x) + alpha M(x - M(x)); float32."""
    *below, last = corrections
    if below:
        first = _corrected(x, tuple(below), rule, dim)
        return first + last.number * _corrected(x.float() - first, tuple(below), rule, dim)
    if last.kind is CorrectionKind.MACRO_BLOCK_SCALING:
        return _macro_block_scaling(x, last.size, rule, dim)
    if last.kind is CorrectionKind.HADAMARD:
        return _hadamard(x, last.size, rule, dim)
    if last.kind is CorrectionKind.OUTLIER_FALLBACK:
        return _outlier_fallback(x, last.number, rule, dim)
    return _channel_residual(x, last.number, rule, dim)


def _macro_block_scaling(x: torch.Tensor, size: int, rule: Rule, dim: int) -> torch.Tensor:
    """Chhugani et al.: one 8-bit mantissa for `size` elements moves their amax to just under 6 * 2^k.

    True division: a reciprocal differs in 30 % of fp32 values and flips m8 now and then.
    """
    macro, shape = to_blocks(x, dim, size)
    amax = macro.abs().amax(-1, keepdim=True)
    # A number over a tensor would be torch's reciprocal, multiplied.
    ratio = torch.full_like(amax, MXFP4.qmax) / torch.where(amax > 0, amax, 1.0)
    m8 = (ratio.view(torch.int32) & 0x7F8000) >> 15
    f = torch.where(amax > 0, 1.0 + m8.float() / 256.0, 1.0)
    scaled = (macro * f).reshape(macro.shape[0], macro.shape[1] * size // MXFP4.block, MXFP4.block)
    q, _ = quantized(scaled, MXFP4, rule, torch.float64)
    return from_blocks((q.reshape(macro.shape) / f).float(), shape)


def _outlier_fallback(x: torch.Tensor, alpha: float, rule: Rule, dim: int) -> torch.Tensor:
    blocks, shape = to_blocks(x, dim, MXFP4.block)
    first, _ = quantized(blocks, MXFP4, rule, torch.float64)
    residual = (blocks - first).float()
    second, _ = quantized(residual, MXFP4, rule, torch.float64)
    return from_blocks((first + alpha * second).float(), shape)


def _channel_residual(x: torch.Tensor, percent: float, rule: Rule, dim: int) -> torch.Tensor:
    """QUADS (arXiv 2607.15810): the chosen channels' residual, gathered, is the operand of a second, short GEMM.

    Blocks of the second pass are 32 of the chosen channels, in their order. At least one channel is chosen; of
    channels with equal error energy the first.
    """
    blocks, shape = to_blocks(x, dim, MXFP4.block)
    first, _ = quantized(blocks, MXFP4, rule, torch.float64)
    width = shape.moved[-1]
    n_rows, padded = len(blocks), blocks.shape[1] * MXFP4.block
    q = first.reshape(n_rows, padded).clone()
    # Excluded blocks have no residual: a NaN among the gathered channels would take their neighbours along.
    residual = (blocks.reshape(n_rows, padded) - q).nan_to_num(0.0, 0.0, 0.0)
    order = residual[:, :width].square().sum(0).argsort(descending=True, stable=True)
    chosen = order[: channels_of(percent, width)].sort().values
    second, _ = quantized(pad_rows(residual[:, chosen].float(), MXFP4.block), MXFP4, rule, torch.float64)
    q[:, chosen] += second.reshape(n_rows, second.shape[1] * MXFP4.block)[:, : len(chosen)]
    return from_blocks(q.float().reshape(first.shape), shape)


def channels_of(percent: float, width: int) -> int:
    """Return how many of `width` channels make `percent` of them: rounded down, at least one where there is any."""
    return min(max(int(width * percent / 100.0), 1), width)


def _hadamard(x: torch.Tensor, size: int, rule: Rule, dim: int) -> torch.Tensor:
    groups, shape = to_blocks(x, dim, size)
    n_rows, width = groups.shape[0], groups.shape[1] * size
    signs = rotation_signs(size, x.device)
    blocks = pad_rows(walsh_hadamard(groups * signs).reshape(n_rows, width), MXFP4.block)
    q, _ = quantized(blocks, MXFP4, rule)
    back = q.reshape(n_rows, blocks.shape[1] * MXFP4.block)[:, :width].reshape(groups.shape)
    return from_blocks(walsh_hadamard(back) * signs, shape)


def walsh_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return the normalised Hadamard transform of the last axis (a power of two). It is its own inverse.

    By butterflies, not a product: autocast and TF32 would round a product.
    """
    size = x.shape[-1]
    y = x
    half = 1
    while half < size:
        pairs = y.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs.unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        half *= 2
    return y * size**-0.5


@cache
def rotation_signs(size: int, device: torch.device) -> torch.Tensor:
    """Return signs, float32 [size], from a private linear congruential generator: the global RNG is not ours."""
    state, signs = stochastic.SEED, []
    for _ in range(size):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        signs.append(1.0 if state >> 63 else -1.0)
    return torch.tensor(signs, device=device)
