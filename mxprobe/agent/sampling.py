"""Which rows are measured. Private generators only: the global random state belongs to the run."""

from __future__ import annotations

import zlib

import torch

TILE = 32


def seed_of(step: int, module: str) -> int:
    """A seed that differs between steps and modules and not between runs."""
    return (zlib.crc32(module.encode()) << 20) ^ step


def sample_tiles(n: int, limit: int, *, seed: int, device: torch.device) -> torch.Tensor | None:
    """Sorted indices (int64, on `device`) of whole, aligned 32-element tiles of range(n); None for all of them.

    At most `limit` elements, at least one tile, drawn without replacement. Tiles, because blocks along tokens
    must be measured as they were formed; a short last tile is measured only where everything is.
    """
    if n <= max(limit, TILE):
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    tiles = torch.randperm(n // TILE, generator=generator, device=device)[: max(limit // TILE, 1)]
    within = torch.arange(TILE, device=device)
    return (tiles.sort().values[:, None] * TILE + within).reshape(-1)


def take(x: torch.Tensor, index: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    """A copy of the chosen rows (or columns): later in-place changes of `x` must not reach it."""
    return x.detach().clone() if index is None else x.detach().index_select(dim, index)
