"""Stochastic rounding, with random numbers of its own: the global generator is the run's. Shipped.

    Q(x) = s step floor(|x| / (s step) + U)     step: spacing of the grid at |x| / s,  U uniform in [0, 1)

U of element i (its number in the rows that are cut into blocks) in draw d is a word of Philox4x32-10 under a private
key: word d mod 4 of counter (i mod 2^32, i div 2^32, d div 4, bits of x in float32). So draws are the same on every
backend, in what-ifs and in emulation, and two tensors of one shape are rounded differently.
"""

from __future__ import annotations

import torch

from mxprobe_kernels.blocks import from_blocks, pad_rows, rows_of, to_blocks
from mxprobe_kernels.formats import Format, Rule
from mxprobe_kernels.quantizer import quantized
from mxprobe_kernels.rounding import power_of_two
from mxprobe_kernels.torch_backend import CPU_TILE_ELEMENTS, DEVICE_TILE_ELEMENTS

SEED = 0x6D787072
"""The key is SEED + salt."""
DRAWS = 8
"""What-ifs report means of counts and energies over this many draws."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[torch.Tensor, torch.Tensor, int, torch.Tensor], key: int) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox4x32-10 for counters of four words under a key of 64 bits; words are int64."""
    a, b, third, d = counter
    c = torch.full_like(a, third)
    keys = [key & _LOW, key >> 32 & _LOW]
    for _ in range(10):
        # int64 products wrap, and their bits are those of the unsigned ones
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = (second >> 32 & _LOW) ^ b ^ keys[0], (first >> 32 & _LOW) ^ d ^ keys[1]
        b, d = second & _LOW, first & _LOW
        keys = [(key + weyl) & _LOW for key, weyl in zip(keys, _WEYL)]
    return a, b, c, d


def uniform(rows: torch.Tensor, *, draw: int = 0, salt: int = 0) -> torch.Tensor:
    """Return U of each element of rows [R, K], float32 [R, K]: multiples of 2^-24 in [0, 1)."""
    limit = CPU_TILE_ELEMENTS if rows.device.type == "cpu" else DEVICE_TILE_ELEMENTS
    number = torch.arange(rows.numel(), device=rows.device).split(limit)
    bits = rows.float().contiguous().view(torch.int32).flatten().split(limit)
    words = [
        philox((i & _LOW, i >> 32, draw // 4, b.to(torch.int64) & _LOW), SEED + salt)[draw % 4]
        for i, b in zip(number, bits)
    ]
    return (torch.cat(words) >> 8).float().mul_(2.0**-24).view(rows.shape)


@torch.no_grad()
def quantize(
    x: torch.Tensor,
    format: Format,
    rule: Rule,
    dim: int,
    *,
    draw: int = 0,
    salt: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return Q(x) of one draw in `dtype`, shaped like x, with blocks along `dim`; NaN in blocks that are not finite.

    The format's scales are powers of two. `salt` selects another sequence of draws, as a seed would.
    """
    blocks, shape = to_blocks(x, dim, format.block, format.block_rows)
    nearest, exponent = quantized(blocks, format, rule)
    excluded = nearest.isnan()
    scale = power_of_two(exponent)
    u = pad_rows(uniform(rows_of(x, dim), draw=draw, salt=salt), format.block, format.block_rows)
    z = blocks.abs().double().masked_fill_(excluded, 0.0) / scale
    binade = ((z.view(torch.int64) >> 52) - 1023).clamp_(min=format.min_exponent)
    step = power_of_two(binade - format.mantissa_bits)
    c = (z / step).add_(u).floor_().mul_(step).clamp_(max=format.qmax)
    q = torch.copysign(c * scale, blocks.double()).masked_fill_(excluded, float("nan"))
    return from_blocks(q.to(dtype), shape)
