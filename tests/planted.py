"""Planted faults with known answers, on the level of one tensor: [rows, K] float32, K a multiple of 128.

Each puts the rounding error of MXFP4 where its name says: elements on the grid of another scale, elements below
the smallest code, elements between codes. `EXPECTED` gives the scale rule, the component and the corrections that
count as right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 32
MACRO_BLOCK = 128
NONZERO_CODES = torch.tensor([1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Generator = torch.Generator
Plant = Callable[[int, int, Generator], torch.Tensor]


def scale_only(
    rows: int,
    k: int,
    generator: Generator,
    *,
    mantissa: tuple[float, float] = (1.03, 1.35),
    jitter: float = 0.01,
) -> torch.Tensor:
    """Elements on the E2M1 grid of a scale that is no power of two, one mantissa per macro block."""
    low, high = mantissa
    m = torch.rand(rows, k // MACRO_BLOCK, 1, generator=generator) * (high - low) + low
    z = _codes(rows, k, generator, count=6)
    z[..., 0] = 6.0
    x = z * m.repeat_interleave(MACRO_BLOCK // BLOCK, 1) * _powers(rows, k, generator)
    return _jittered(x, jitter, generator)


def gradient_scale_only(rows: int, k: int, generator: Generator) -> torch.Tensor:
    """`scale_only` as a gradient has it: tokens whose sizes differ by 2^24, most of them tiny."""
    size = 2.0 ** torch.randint(-30, -5, (rows, 1), generator=generator).float()
    return scale_only(rows, k, generator) * size


def drifted_scale(rows: int, k: int, generator: Generator, *, drift: float) -> torch.Tensor:
    """Two faults: values left on the grid of an earlier, real-valued scale, that have moved since.

    drift: standard deviation of the move, in units of the block's scale. What the stale scale makes of the error and
    what the move does: `drift_share`.
    """
    x = scale_only(rows, k, generator, jitter=0.0).reshape(rows, k // BLOCK, BLOCK)
    scale = x.abs().amax(-1, keepdim=True) / 6.0
    noise = torch.randn(x.shape, generator=generator) * drift
    noise[..., 0] = 0.0
    return (x + noise * scale).clamp(-6.0 * scale, 6.0 * scale).reshape(rows, k)


def drift_share(x: torch.Tensor) -> float:
    """Part of the error energy of rounding by `rceil` in which the earlier scale has no part: what rounding to the
    grid of that scale (each block's amax / 6) would leave, written out in float64."""
    blocks = x.double().reshape(x.shape[0], -1, BLOCK)
    ideal = blocks.abs().amax(-1, keepdim=True) / 6.0
    power = 2.0 ** torch.ceil(torch.log2(ideal))
    codes = torch.cat([torch.zeros(1), torch.tensor([0.5]), NONZERO_CODES]).double()

    def error(scale: torch.Tensor) -> torch.Tensor:
        z = (blocks / scale)[..., None].abs()
        nearest = codes[(z - codes).abs().argmin(-1)]
        return ((nearest * scale - blocks.abs()) ** 2).sum()

    return float(error(ideal) / error(power))


def saturation_under_floor(rows: int, k: int, generator: Generator) -> torch.Tensor:
    """As `scale_only`; under the rule `floor` each block's amax lies above 6 s and is clipped."""
    return scale_only(rows, k, generator, mantissa=(1.06, 1.32), jitter=0.0)


def deadzone_only(rows: int, k: int, generator: Generator) -> torch.Tensor:
    """One element per block at exactly 6 * 2^n, all others under a quarter of the scale."""
    z = (torch.rand(rows, k // BLOCK, BLOCK, generator=generator) * 0.22 + 0.02) * _signs(rows, k, generator)
    z[..., 0] = 6.0
    return (z * _powers(rows, k, generator)).reshape(rows, k)


def grid_only(rows: int, k: int, generator: Generator) -> torch.Tensor:
    """amax at exactly 6 * 2^n, the others around the middle between two codes, none in the deadzone."""
    low = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    high = torch.tensor([1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    cell = torch.randint(0, 6, (rows, k // BLOCK, BLOCK), generator=generator)
    within = 0.5 + 0.7 * (torch.rand(cell.shape, generator=generator) - 0.5)
    z = (low[cell] + within * (high[cell] - low[cell])) * _signs(rows, k, generator)
    z[..., 0] = 6.0
    return (z * _powers(rows, k, generator)).reshape(rows, k)


def clean(rows: int, k: int, generator: Generator) -> torch.Tensor:
    """On the grid of a power-of-two scale, but for a jitter of 0.5 %. One 6 a block: jitter above it doubles s."""
    z = _codes(rows, k, generator, count=5)
    z[..., 0] = 6.0
    return _jittered(z * _powers(rows, k, generator), 0.005, generator)


def mixed_by_energy(first: Plant, second: Plant, share: float, error_energy: Callable[[torch.Tensor], float]) -> Plant:
    """Rows of two plants, shuffled, the second scaled so that the first carries `share` of the error energy.

    Scaled by a power of two, which moves no code; so the share is met within a factor of two in amplitude.
    """

    def plant(rows: int, k: int, generator: Generator) -> torch.Tensor:
        a, b = first(rows // 2, k, generator), second(rows - rows // 2, k, generator)
        wanted = error_energy(a) * (1.0 - share) / share / error_energy(b)
        b = b * 2.0 ** round(0.5 * torch.log2(torch.tensor(wanted)).item())
        return torch.cat([a, b])[torch.randperm(rows, generator=generator)]

    return plant


@dataclass(frozen=True)
class Expected:
    plant: Plant
    rule: str
    component: str
    corrections: frozenset[str]
    """Corrections that count as right; empty: none may be named."""


EXPECTED: dict[str, Expected] = {
    "scale_only": Expected(scale_only, "rceil", "scale", frozenset({"mbs:32", "mbs:64", "mbs:128"})),
    "saturation_under_floor": Expected(
        saturation_under_floor,
        "floor",
        "saturation",
        frozenset({"rule:rceil", "rule:even", "rule:oas", "mbs:32", "mbs:64", "mbs:128"}),
    ),
    "deadzone_only": Expected(deadzone_only, "rceil", "deadzone", frozenset({"of:0.5", "of:1.0"})),
    "grid_only": Expected(grid_only, "rceil", "grid", frozenset({"of:0.5", "of:1.0", "keep_high_precision"})),
    "clean": Expected(clean, "rceil", "none", frozenset()),
}


def _signs(rows: int, k: int, generator: Generator) -> torch.Tensor:
    return torch.randint(0, 2, (rows, k // BLOCK, BLOCK), generator=generator) * 2.0 - 1.0


def _powers(rows: int, k: int, generator: Generator) -> torch.Tensor:
    return 2.0 ** torch.randint(-2, 3, (rows, k // BLOCK, 1), generator=generator).float()


def _codes(rows: int, k: int, generator: Generator, *, count: int) -> torch.Tensor:
    index = torch.randint(0, count, (rows, k // BLOCK, BLOCK), generator=generator)
    return NONZERO_CODES[index] * _signs(rows, k, generator)


def _jittered(x: torch.Tensor, jitter: float, generator: Generator) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=generator) * jitter
    noise[..., 0] = 0.0  # the block's amax stays where it was put
    return (x * (1.0 + noise)).flatten(1)
