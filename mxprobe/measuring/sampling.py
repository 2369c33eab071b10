"""Which rows are measured. Private generators only: the global random state belongs to the run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

TILE = 32
CERTAIN_SHARE = 4
"""One in so many of the rows measured is one of the largest: benchmarks/sampling.py."""


def seed_of(step: int, module: str) -> int:
    """A seed that differs between steps and modules and not between runs."""
    return (zlib.crc32(module.encode()) << 20) ^ step


def spread(n: int, total: int, device: torch.device | None = None) -> torch.Tensor:
    """Return int64 [n] of range(total), evenly spaced, ascending; made on the device, since sending it would wait."""
    return torch.arange(n, device=device) * total // max(n, 1)


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


@dataclass(frozen=True)
class Rows:
    """Single rows of range(N): R drawn by lot, then C that are always in."""

    index: torch.Tensor
    """int64 [R + C], on the device of the data."""
    n_certain: int
    drawn_weight: float
    """1 / chance of a drawn row; a certain row has 1."""

    @property
    def n_effective(self) -> int:
        """How many rows of equal weight would tell as much of a sum to which all rows add alike."""
        n_drawn = self.index.shape[0] - self.n_certain
        total, squares = (n_drawn * self.drawn_weight**p + self.n_certain for p in (1, 2))
        return round(total**2 / squares)

    def keep(self, kept: torch.Tensor) -> Rows:
        """Return the rows for which `kept`, bool [R + C], is true; waits for the device."""
        n_certain = int(kept[kept.shape[0] - self.n_certain :].sum())
        return Rows(self.index[kept], n_certain, self.drawn_weight)

    def weights(self) -> torch.Tensor:
        """float64 [R + C]; sums with them are the sums over all N rows, in expectation (Horvitz-Thompson)."""
        weights = torch.full(self.index.shape, self.drawn_weight, dtype=torch.float64, device=self.index.device)
        weights[self.index.shape[0] - self.n_certain :] = 1.0
        return weights


def sample_singles(norms: torch.Tensor, limit: int, *, seed: int) -> Rows | None:
    """At most `limit` rows of N by their norms [N], those of the largest among them; None for all.

    Where few rows hold most of the energy, as attention sinks do, a ratio of sums over rows drawn alike says little.
    A row with a NaN is one of the largest. Nothing waits for the device.
    """
    n, limit = norms.shape[0], max(limit, TILE)
    if n <= limit:
        return None
    n_certain = limit // CERTAIN_SHARE
    certain = norms.nan_to_num(nan=float("inf")).topk(n_certain).indices
    generator = torch.Generator(device=norms.device)
    generator.manual_seed(seed)
    lots = torch.rand(n, generator=generator, device=norms.device).index_fill(0, certain, 2.0)
    drawn = lots.topk(limit - n_certain, largest=False).indices
    weight = (n - n_certain) / (limit - n_certain)
    return Rows(torch.cat((drawn.sort().values, certain.sort().values)), n_certain, weight)


def row_norms(x: torch.Tensor) -> torch.Tensor:
    """Return the norms of the rows of x [N, K], at least float32, without a copy of x."""
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32 if narrow else None)


def take(x: torch.Tensor, index: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    """Copy the chosen rows (or columns): later in-place changes of `x` must not reach them."""
    return x.detach().clone() if index is None else x.detach().index_select(dim, index)
