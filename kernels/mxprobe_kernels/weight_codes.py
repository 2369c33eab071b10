"""A weight as the engine holds it: a hash of its codes; and sketches of matrices by hashed signs. Shipped.

    hash = sum over elements of mix(bits of Q(w), row, column)  mod 2^64      order-independent: shards add

Never synchronises, touches no random state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxprobe_kernels.formats import Format, Rule, get_format, get_rule
from mxprobe_kernels.quantizer import quantize_dequantize

CHUNK_ELEMENTS = 1 << 20

_ROW, _COLUMN = -7046029254386353131, -4658895280553007687  # odd, from splitmix64
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


@torch.no_grad()
def code_hash(
    w: torch.Tensor,
    *,
    format: str | Format = "mxfp4",
    rule: str | Rule = "rceil",
    first_row: int = 0,
    first_column: int = 0,
) -> torch.Tensor:
    """Return the hash of w [O, K], int64 [], with blocks along K; zeros of either sign are alike.

    A shard whose place in the whole is given by `first_row` and `first_column` yields its part of the whole's hash:
    parts are added (they wrap). ValueError where a shard cuts a block, or w is no matrix.
    """
    record, chosen = get_format(format), get_rule(rule)
    if first_column % record.block or first_row % record.block_rows:
        place = f"first_column {first_column}" if first_column % record.block else f"first_row {first_row}"
        raise ValueError(f"{place} cuts a block of {record.block}: the shard has other scales")
    column = torch.arange(first_column, first_column + _matrix(w).shape[1], device=w.device) * _COLUMN
    total = torch.zeros((), dtype=torch.int64, device=w.device)
    for begin, part in _chunks(w, record):
        q, _ = quantize_dequantize(part.float(), format=record, rule=chosen)
        row = torch.arange(first_row + begin, first_row + begin + len(part), device=w.device) * _ROW
        bits = (q + 0.0).view(torch.int32).to(torch.int64)
        total += mix(bits + row[:, None] + column).sum()
    return total


def mix(z: torch.Tensor) -> torch.Tensor:
    """Return the finalizer of splitmix64 of z, int64 to int64."""
    z = (z ^ ((z >> 30) & (1 << 34) - 1)) * _FIRST
    z = (z ^ ((z >> 27) & (1 << 37) - 1)) * _SECOND
    return z ^ ((z >> 31) & (1 << 33) - 1)


@torch.no_grad()
def row_sketch(x: torch.Tensor, n: int, *, seed: int = 0) -> torch.Tensor:
    """Return S x, float64 [n, C], of x [M, C] with random signs S [n, M]: E[(Sx)^T (Sx)] = n x^T x.

    Signs are hashes of (seed, sketch, row): the same for every tensor of one seed, which may then be compared.
    """
    result = torch.zeros((n, _matrix(x).shape[1]), dtype=torch.float64, device=x.device)
    sketch = torch.arange(n, device=x.device)[:, None] * _COLUMN + seed * 2654435761
    for begin, part in _chunks(x, get_format("mxfp4")):
        row = torch.arange(begin, begin + len(part), device=x.device) * _ROW
        signs = torch.where(mix(mix(sketch) + row) < 0, -1.0, 1.0).double()
        result += signs @ part.double()
    return result


def _chunks(x: torch.Tensor, format: Format) -> Iterator[tuple[int, torch.Tensor]]:
    """First row and rows of the pieces; a tensor scale is that of the whole tensor, which is then one piece."""
    high = format.block_rows
    rows = max(CHUNK_ELEMENTS // max(x.shape[1] * high, 1), 1) * high if not format.tensor_scale else max(len(x), 1)
    for begin in range(0, len(x), rows):
        yield begin, x[begin : begin + rows].detach()


def _matrix(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        raise ValueError(f"a matrix is wanted, not a tensor of {x.dim()} dimensions")
    return x
