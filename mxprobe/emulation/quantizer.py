"""Q(x) of one operand, made of `mxprobe_kernels` quantizers only, and opaque to torch.compile.

of on top of M     M(x) + alpha M(x - M(x))        M = mbs or had
2d                 Q over B x B tiles, each one block of B^2 elements
sr                 the grid neighbours lo <= |x|/s <= hi, hi with probability (|x|/s - lo) / (hi - lo)
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from mxprobe.emulation.operand import Operand
from mxprobe_kernels import apply_correction, quantize_dequantize
from mxprobe_kernels.formats import Correction, CorrectionKind, Format, Rule, get_format
from mxprobe_kernels.rounding import power_of_two


def quantize(x: torch.Tensor, operand: Operand, *, dim: int, salt: int = 0) -> torch.Tensor:
    """x as its GEMM receives it: quantized and dequantized in blocks along `dim`, shaped and typed like x.

    x: floating point, any shape; square blocks take all axes but the last as rows. `salt` selects the draw of
    stochastic rounding, which is a function of salt, position and value alone, so that recomputed activations are
    rounded alike and no random generator is touched. Records nothing for autograd.
    """
    if operand.is_high_precision:
        return x.detach()
    if torch.compiler.is_compiling():
        return _quantize_op(x, str(operand), dim, salt)
    return _quantize(x, operand, dim, salt)


@torch.library.custom_op("mxprobe::quantize_operand", mutates_args=())
def _quantize_op(x: torch.Tensor, operand: str, dim: int, salt: int) -> torch.Tensor:
    return _quantize(x, Operand.parse(operand), dim, salt).contiguous()


@_quantize_op.register_fake
def _(x: torch.Tensor, operand: str, dim: int, salt: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.no_grad()
def _quantize(x: torch.Tensor, operand: Operand, dim: int, salt: int) -> torch.Tensor:
    format = get_format(operand.format)
    if operand.square:
        return _square(x, operand, format, salt)
    if operand.stochastic:
        return _stochastic(x, format, operand.rule, dim, salt)
    if operand.corrections:
        return _corrected(x, operand.corrections, operand.rule, dim).to(x.dtype)
    return quantize_dequantize(x, format=format, rule=operand.rule, dim=dim)[0]


def _corrected(x: torch.Tensor, corrections: tuple[Correction, ...], rule: Rule, dim: int) -> torch.Tensor:
    *inner, last = corrections
    if not inner:
        return apply_correction(x, last, rule=rule, dim=dim)
    if last.kind is not CorrectionKind.OUTLIER_FALLBACK:
        raise ValueError(f"{last} cannot follow {inner[-1]}")
    first = _corrected(x, tuple(inner), rule, dim)
    second = _corrected(x.float() - first, tuple(inner), rule, dim)
    return first + float(last.parameter or 0.0) * second


def _square(x: torch.Tensor, operand: Operand, format: Format, salt: int) -> torch.Tensor:
    """[..., C] as [R, C] in B x B tiles; ragged edges are padded with zeros, which change no scale."""
    block = format.block
    rows = x.reshape(-1, x.shape[-1])
    n_rows, n_columns = rows.shape
    padded = F.pad(rows, (0, -n_columns % block, 0, -n_rows % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
    tile_format = replace(format, block=block * block)
    flat = tiles.reshape(*tiles.shape[:2], block * block)
    if operand.stochastic:
        q = _stochastic(flat, tile_format, operand.rule, -1, salt)
    else:
        q, _ = quantize_dequantize(flat, format=tile_format, rule=operand.rule, dim=-1)
    return q.reshape(tiles.shape).transpose(1, 2).reshape(padded.shape)[:n_rows, :n_columns].reshape(x.shape)


def _stochastic(x: torch.Tensor, format: Format, rule: Rule, dim: int, salt: int) -> torch.Tensor:
    nearest, exponent = quantize_dequantize(x, format=format, rule=rule, dim=dim)
    per_element = power_of_two(exponent).repeat_interleave(format.block, dim=dim).narrow(dim, 0, x.shape[dim])
    z = (x.double().abs() / per_element).clamp_(max=format.qmax)
    grid = torch.tensor(format.grid, dtype=torch.float64, device=x.device)
    above = torch.searchsorted(grid, z.contiguous(), right=True).clamp_(max=len(format.grid) - 1)
    low, high = grid[above - 1], grid[above]
    magnitude = torch.where((z - low) > _uniform(x, salt) * (high - low), high, low) * per_element
    return torch.where(nearest.isnan(), nearest, torch.copysign(magnitude, x.double()).to(x.dtype))


_GOLDEN = 0x9E3779B1
_MASK = 0xFFFFFFFF


def _uniform(x: torch.Tensor, salt: int) -> torch.Tensor:
    """[0, 1) float64 shaped like x: murmur3's finalizer over position, the bits of the value, and the salt."""
    bits = x.float().contiguous().view(torch.int32).to(torch.int64) & _MASK
    position = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    h = _mix((position + salt * _GOLDEN) & _MASK)
    return _mix(h ^ bits).double() / 2.0**32


def _mix(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)
