"""Corrections as functions of a tensor: what x becomes under each, for what-ifs and emulation. Shipped.

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

from functools import cache

import torch

from mxprobe_kernels import stochastic
from mxprobe_kernels.blocks import from_blocks, pad_rows, rows_of, to_blocks
from mxprobe_kernels.formats import MXFP4, Correction, CorrectionKind, Format, Rule, get_rule
from mxprobe_kernels.quantizer import quantized

_SIGN_SEED = 0x6D787072


@torch.no_grad()
def apply_correction(
    x: torch.Tensor, correction: str | Correction, *, rule: str | Rule = "rceil", dim: int = -1
) -> torch.Tensor:
    """x under a correction: quantized, dequantized and rotated or scaled back; float32, shaped like x.

    x: float32, bfloat16, float16 or float64 (rounded to float32). A block with a NaN or an infinity comes back
    as NaN. The random signs of `had:N` come from a fixed seed of their own, so that two tensors that meet in
    a GEMM are rotated alike. ValueError for an unknown correction or a parameter it cannot take.
    """
    parsed = Correction.parse(correction) if isinstance(correction, str) else correction
    base = get_rule(rule)
    kind, parameter = parsed.kind, parsed.parameter
    if kind is CorrectionKind.KEEP_HIGH_PRECISION:
        rows_of(x, dim)
        return x.detach().float()
    if kind is CorrectionKind.RULE:
        return _quantize(x, MXFP4, get_rule(str(parameter)), dim)
    if kind is CorrectionKind.MACRO_BLOCK_SCALING:
        return _macro_block_scaling(x, _positive_integer(parsed, multiple_of=MXFP4.block), base, dim)
    if kind is CorrectionKind.OUTLIER_FALLBACK:
        return _outlier_fallback(x, float(parameter or 0.0), base, dim)
    if kind is CorrectionKind.CHANNEL_RESIDUAL:
        return _channel_residual(x, _percent(parsed), base, dim)
    if kind is CorrectionKind.STOCHASTIC:
        return stochastic.quantize(x, base, dim)
    if kind is CorrectionKind.HADAMARD:
        return _hadamard(x, _power_of_two(parsed), base, dim)
    format = parsed.format
    assert format is not None  # every other kind is a format's name
    return _quantize(x, format, base if parsed.keeps_format else Rule.RCEIL, dim)


def parameter_of(correction: Correction) -> float:
    """The number in `mbs:128` or `had:32`, checked; in `of:0.5`; 0 of others. ValueError as for `apply_correction`."""
    if correction.kind is CorrectionKind.MACRO_BLOCK_SCALING:
        return _positive_integer(correction, multiple_of=MXFP4.block)
    if correction.kind is CorrectionKind.HADAMARD:
        return _power_of_two(correction)
    return float(correction.parameter or 0.0) if correction.kind is CorrectionKind.OUTLIER_FALLBACK else 0.0


def _quantize(x: torch.Tensor, format: Format, rule: Rule, dim: int) -> torch.Tensor:
    blocks, shape = to_blocks(x, dim, format.block, format.block_rows)
    q, _ = quantized(blocks, format, rule)
    return from_blocks(q, shape)


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
    """How many of `width` channels `percent` of them are: rounded down, at least one where there is any."""
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
    """Normalised Hadamard transform of the last axis (a power of two), its own inverse.

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
    """float32 [size] of +1 and -1 from a private linear congruential generator: the global RNG is not ours."""
    state, signs = _SIGN_SEED, []
    for _ in range(size):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        signs.append(1.0 if state >> 63 else -1.0)
    return torch.tensor(signs, device=device)


def _positive_integer(correction: Correction, multiple_of: int) -> int:
    value = correction.parameter
    if not isinstance(value, int) or value <= 0 or value % multiple_of:
        raise ValueError(f"correction {correction}: the block must be a positive multiple of {multiple_of}")
    return value


def _percent(correction: Correction) -> float:
    value = float(correction.parameter or 0.0)
    if not 0.0 < value <= 100.0:
        raise ValueError(f"correction {correction}: the percentage of channels must be above 0 and at most 100")
    return value


def _power_of_two(correction: Correction) -> int:
    value = correction.parameter
    if not isinstance(value, int) or value < 2 or value & (value - 1):
        raise ValueError(f"correction {correction}: the size of a Hadamard rotation must be a power of two, at least 2")
    return value
