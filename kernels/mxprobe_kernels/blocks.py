"""Cutting a tensor into blocks along one axis, and putting it back together. Shipped.

R = rows (all other axes flattened), K = length of the block axis, B = block size, N = ceil(K / B) blocks a row.
Square formats have blocks of b x b: then R stands for ceil(R / b) rows of blocks, and B for their b * b elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mxprobe_kernels.formats import Format


class BlockShape(NamedTuple):
    """How to undo `to_blocks`."""

    moved: tuple[int, ...]
    """Shape of the tensor with the block axis last."""
    dim: int
    block_rows: int = 1


def rows_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x [..., K at dim, ...] as rows [R, K] of its own dtype, a view where strides allow.

    ValueError on what cannot be cut into blocks.
    """
    if x.dim() == 0:
        raise ValueError("a scalar has no axis to cut into blocks; pass a tensor with at least one dimension")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is out of range for a tensor of {x.dim()} dimensions")
    if not x.is_floating_point():
        raise ValueError(f"cannot quantize a tensor of {x.dtype}; pass float32, bfloat16, float16 or float64")
    moved = x.detach().movedim(dim, -1)
    return moved.reshape(prod(moved.shape[:-1]), moved.shape[-1])


def unit_stride(rows: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return rows [R, K] as a matrix of unit stride along its second axis, and whether blocks run down that matrix.

    Blocks run along K.
    """
    columns = rows.stride(0) == 1 and rows.stride(1) != 1
    matrix = rows.t() if columns else rows
    return (matrix if matrix.stride(1) == 1 else matrix.contiguous()), columns


def to_blocks(x: torch.Tensor, dim: int, block: int, block_rows: int = 1) -> tuple[torch.Tensor, BlockShape]:
    """Cut x [..., K at dim, ...] into blocks, float32 [R, N, B]; the last block of a row is padded with zeros."""
    rows = rows_of(x, dim)
    moved = x.movedim(dim, -1)
    return pad_rows(rows, block, block_rows), BlockShape(tuple(moved.shape), dim, block_rows)


def pad_rows(rows: torch.Tensor, block: int, block_rows: int = 1) -> torch.Tensor:
    """Cut rows [R, K] into blocks, float32 [R, N, B]. A block never crosses a row, or `block_rows` of them."""
    length = rows.shape[1]
    padding, below = -length % block, -rows.shape[0] % block_rows
    rows = rows.float()
    if padding or below:
        rows = F.pad(rows, (0, padding, 0, below))
    shape = (rows.shape[0] // block_rows, rows.shape[1] // block)
    if block_rows == 1:
        return rows.reshape(*shape, block)
    return rows.reshape(shape[0], block_rows, shape[1], block).transpose(1, 2).reshape(*shape, block_rows * block)


def from_blocks(blocks: torch.Tensor, shape: BlockShape) -> torch.Tensor:
    """Put blocks [R, N, B] back into the shape that `to_blocks` was given."""
    length, high = shape.moved[-1], shape.block_rows
    n_rows, n_blocks, size = blocks.shape
    if high > 1:
        blocks = blocks.reshape(n_rows, n_blocks, high, size // high).transpose(1, 2)
    flat = blocks.reshape(n_rows * high, n_blocks * size // high)[: prod(shape.moved[:-1]), :length]
    return flat.reshape(shape.moved).movedim(-1, shape.dim)


def per_block(values: torch.Tensor, shape: BlockShape) -> torch.Tensor:
    """Give values of blocks [R, N] the shape [..., N at dim, ...]; each row of a square block gets its own copy."""
    if shape.block_rows > 1:
        values = values.repeat_interleave(shape.block_rows, 0)[: prod(shape.moved[:-1])]
    return values.reshape(*shape.moved[:-1], values.shape[1]).movedim(-1, shape.dim)


def block_lengths(n_blocks: int, length: int, block: int, device: torch.device) -> torch.Tensor:
    """Return the number of elements of each block of a row, int64 [N]; only the last block can be short."""
    lengths = torch.full((n_blocks,), block, dtype=torch.int64, device=device)
    if n_blocks:
        lengths[-1] = length - (n_blocks - 1) * block
    return lengths


def block_sizes(shape: tuple[int, int] | torch.Size, format: Format, device: torch.device) -> torch.Tensor:
    """Return the number of elements of each block of rows [R, K], int64 [R or 1, N]."""
    n_rows, length = shape
    lengths = block_lengths(-(-length // format.block), length, format.block, device)
    if format.block_rows == 1:
        return lengths[None]
    heights = block_lengths(-(-n_rows // format.block_rows), n_rows, format.block_rows, device)
    return heights[:, None] * lengths


def tiles(rows: torch.Tensor, block: int, max_elements: int, block_rows: int = 1) -> Iterator[torch.Tensor]:
    """Yield pieces [r, k] of rows [R, K] of at most about `max_elements` elements, cut between blocks only."""
    n_rows, length = rows.shape
    width = length
    if length * block_rows > max_elements:
        width = max(max_elements // (block * block_rows), 1) * block
    height = max(max_elements // max(width * block_rows, 1), 1) * block_rows
    for top in range(0, n_rows, height):
        for left in range(0, length, max(width, 1)):
            yield rows[top : top + height, left : left + width]
