"""Hard inputs, and whether two measurements of the same tensor agree: for the tests and for `mxprobe selftest`."""

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any

import torch

# What each sum is compared with: a cross term may be zero by a lemma, so its own size is no measure of its error.
_SIZE = {
    "sum_xq": lambda v: v["sum_x2"],
    "sum_xqstar": lambda v: v["sum_x2"],
    "sum_e": lambda v: sqrt(v["n"] * v["sum_e2"]),
    "sum_scale_grid": lambda v: sqrt(v["sum_scale2"] * v["sum_grid2"]),
    "sum_scale_dz": lambda v: sqrt(v["sum_scale2"] * v["sum_dz2"]),
}


def disagreements(measured: Mapping[str, Any], expected: Mapping[str, Any], rtol: float) -> list[str]:
    """Return a line for each count or histogram that differs, and for each sum that differs by more than rtol."""
    found: list[str] = []
    for name, want in expected.items():
        if name in ("exponent", "q"):
            continue
        got = measured[name]
        if name.startswith("sum_"):
            size = _SIZE.get(name, lambda v, name=name: abs(v[name]))(expected)
            wrong = not abs(got - want) <= rtol * size + 1e-300
        else:
            wrong = got != want
        if wrong:
            found.append(f"{name}: {got!r}, expected {want!r}")
    return found


def hard_tensors() -> list[tuple[str, torch.Tensor]]:
    """Return named tensors, [64, 96] or ragged, in the three input dtypes, from fixed seeds."""
    return list(_hard_tensors(torch.Generator().manual_seed(0)))


def _hard_tensors(g: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    yield "gauss bf16", normal(64, 96).bfloat16()
    yield "gauss fp16", normal(64, 96).half()
    yield "gauss fp32", normal(64, 96)
    yield "ragged fp32", normal(33, 77)
    yield "one row bf16", normal(1, 70).bfloat16()
    yield "one column fp16", normal(70, 1).half()
    yield "heavy tails bf16", (normal(64, 96) / (normal(64, 96) ** 2 + 1e-9).sqrt()).bfloat16()
    yield "tiny gradients bf16", (normal(64, 96) * 1e-30 * torch.exp(3 * normal(64, 1))).bfloat16()
    yield "huge fp32", normal(64, 96) * 1e36
    yield "wide bf16", (normal(64, 96) * torch.exp2(torch.randint(-126, 120, (64, 96), generator=g))).bfloat16()
    yield "subnormal fp16", (normal(64, 96) * 1e-6).half()
    yield "subnormal fp32", normal(64, 96) * 1e-39
    holes = normal(64, 96)
    holes[:, :32] = 0
    holes[3, 40], holes[4, 50], holes[5] = torch.nan, -torch.inf, 0
    yield "zeros and non-finite bf16", holes.bfloat16()
    k = torch.tensor([1, 3, 5, 7, 10, 14, 20, 24.0])
    ties = k[torch.randint(0, 8, (64, 96), generator=g)] * 0.125
    ties[:, ::32] = 3.0
    yield "ideal-scale ties bf16", (ties * torch.exp2(torch.randint(-8, 8, (64, 1), generator=g))).bfloat16()
    # fp32 neighbours of k amax / 24: the ratio to the ideal scale is a tie, or a few parts in 10^8 off one
    amax = torch.rand(64, 1, generator=g, dtype=torch.float64).float() * 6 + 2
    near = (k[torch.randint(0, 8, (64, 96), generator=g)] * amax.double() / 24).float()
    near = torch.where(torch.randint(0, 2, (64, 96), generator=g) > 0, torch.nextafter(near, torch.zeros(())), near)
    near[:, ::32] = amax
    yield "near ideal-scale ties fp32", near
    boundary = torch.tensor([6.0, 3.0, 3.5, 7.0, 8.0]).repeat(13)[:64, None].expand(64, 96).clone()
    boundary[:, 1:] = torch.rand(64, 95, generator=g) * 2.9
    yield "amax at a boundary", boundary
    yield (
        "amax above a boundary",
        torch.where(torch.arange(96) == 0, torch.nextafter(boundary, torch.tensor(torch.inf)), boundary),
    )
    # Energies that only the small ones have: the large lie on both grids, in blocks of their own or among the small.
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])[torch.randint(0, 8, (64, 96), generator=g)]
    grid[:, ::32] = 6
    far = torch.where(torch.arange(64)[:, None] % 3 == 0, grid * 2.0**61, normal(64, 96) * 2.0**-60)
    yield "giants on the grid bf16", far.bfloat16()
    yield "giants on the grid fp32", torch.where(torch.arange(96) < 32, grid * 1e37, normal(64, 96) * 1e-37)
    yield "dust among the grid fp32", torch.where(grid == 0, normal(64, 96) * 1e-30, grid)
    bits = torch.arange(0x3F80, 0x3F80 + 8192).remainder(0x7F00).to(torch.int16)
    yield "every bf16 mantissa", bits.view(torch.bfloat16).reshape(64, 128)
