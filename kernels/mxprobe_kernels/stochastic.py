"""Stochastic rounding to MXFP4, with random numbers of its own: the global generator is the run's. Shipped.

    Q(x) = s step floor(|x| / (s step) + U)     step: spacing of the grid at |x| / s,  U uniform in [0, 1)

U of element i (its number in the rows that are cut into blocks) in draw d is a word of Philox4x32-10 under a private
key: word d mod 4 of counter (i mod 2^32, i div 2^32, d div 4, 0). So draws are the same on every backend.
"""

from __future__ import annotations

import torch

from mxprobe_kernels.blocks import from_blocks, rows_of, to_blocks
from mxprobe_kernels.formats import MXFP4, Rule
from mxprobe_kernels.rounding import amax_bits, power_of_two, scale_exponent

SEED = 0x6D787072
"""The low word of the key; the high one is 0."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(low: torch.Tensor, high: torch.Tensor, third: int, seed: int = SEED) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of counters (low, high, third, 0) under a seed: four int64 tensors of 32-bit words."""
    a, b = low, high
    c, d = torch.full_like(low, third), torch.zeros_like(low)
    keys = [seed, 0]
    for _ in range(10):
        # int64 products wrap, and their bits are those of the unsigned ones
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = (second >> 32 & _LOW) ^ b ^ keys[0], (first >> 32 & _LOW) ^ d ^ keys[1]
        b, d = second & _LOW, first & _LOW
        keys = [(key + weyl) & _LOW for key, weyl in zip(keys, _WEYL)]
    return a, b, c, d


@torch.no_grad()
def quantize(x: torch.Tensor, rule: Rule, dim: int, draw: int = 0) -> torch.Tensor:
    """x of any shape -> Q(x) of one draw, float32, blocks of 32 along `dim`; NaN in blocks that are not finite."""
    blocks, shape = to_blocks(x, dim, MXFP4.block)
    n_rows, length = rows_of(x, dim).shape
    number = torch.arange(n_rows * length, device=x.device).view(n_rows, length)
    # Numbers pass through blocks as integers: float32 could not hold them.
    padded = torch.zeros((n_rows, blocks.shape[1] * MXFP4.block), dtype=torch.int64, device=x.device)
    padded[:, :length] = number
    words = philox(padded & _LOW, padded >> 32, draw // 4)[draw % 4]
    uniform = (words >> 8).double().mul_(2.0**-24).view(blocks.shape)
    bits, excluded = amax_bits(blocks)
    scale = power_of_two(scale_exponent(bits, MXFP4, rule)[0])
    z = blocks.abs().double().masked_fill_(excluded, 0.0) / scale
    step = power_of_two(((z.view(torch.int64) >> 52) - 1023).clamp_(min=0) - MXFP4.mantissa_bits)
    c = (z / step).add_(uniform).floor_().mul_(step).clamp_(max=MXFP4.qmax)
    q = torch.copysign(c * scale, blocks.double()).masked_fill_(excluded, float("nan"))
    return from_blocks(q.float(), shape)
