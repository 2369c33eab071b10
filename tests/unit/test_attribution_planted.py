"""Faults with known answers must be named, and mended by a correction that fits them."""

from __future__ import annotations

import math

import pytest
import torch

from mxprobe.attribution.tensor import TensorJudgement, judge_tensor
from mxprobe.schema import Component
from mxprobe_kernels import apply_correction, decompose, error_fields
from tests.planted import (
    EXPECTED,
    Expected,
    clean,
    deadzone_only,
    drift_share,
    drifted_scale,
    gradient_scale_only,
    grid_only,
    mixed_by_energy,
    scale_only,
)

DRAWS = 60
ROWS, K = 16, 256
WHATIFS = (
    "rule:rceil",
    "rule:floor",
    "rule:even",
    "mbs:32",
    "mbs:64",
    "mbs:128",
    "of:0.5",
    "of:1.0",
    "had:32",
    "nvfp4",
)


def judge(x: torch.Tensor, rule: str) -> TensorJudgement:
    fields = error_fields(x, rule=rule)
    after: dict[str, dict[str, float]] = {}
    for correction in WHATIFS:
        left = (apply_correction(x, correction, rule=rule).double() - x.double()) ** 2
        after[correction] = {"sum_e2": float(left.sum()), "sum_e2_on_d": float((left * fields.on_d).sum())}
    return judge_tensor(fields.decomposition().to_dict(), after)


def is_right(judgement: TensorJudgement, expected: Expected) -> bool:
    named = bool(judgement.chosen) and judgement.chosen[0] in expected.corrections
    return judgement.component == expected.component and (named or not (judgement.chosen or expected.corrections))


@pytest.mark.parametrize("kind", EXPECTED)
def test_pure_plants_are_named_and_mended(kind: str) -> None:
    expected = EXPECTED[kind]
    judgements = [
        judge(expected.plant(ROWS, K, torch.Generator().manual_seed(seed)), expected.rule) for seed in range(DRAWS)
    ]
    wrong = [(j.component, j.chosen) for j in judgements if not is_right(j, expected)]
    assert len(wrong) <= math.floor(0.05 * DRAWS), wrong


def error_energy(x: torch.Tensor) -> float:
    return decompose(x).sum_e2


@pytest.mark.parametrize(
    ("first", "second", "component"),
    [
        (deadzone_only, grid_only, Component.DEADZONE),
        (scale_only, grid_only, Component.SCALE),
        (grid_only, deadzone_only, Component.GRID),
    ],
)
def test_mixes_are_named_by_energy(first, second, component) -> None:
    plant = mixed_by_energy(first, second, 0.8, error_energy)
    named = [judge(plant(32, K, torch.Generator().manual_seed(seed)), "rceil").component for seed in range(20)]
    assert named.count(component) >= 19, named


def test_a_fault_in_the_gradient_alone_is_named_there_and_nowhere_else() -> None:
    wrong = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, w = (clean(ROWS, K, generator) for _ in range(2))
        found = [judge(each, "rceil") for each in (x, w, gradient_scale_only(ROWS, K, generator))]
        right = [
            is_right(each, EXPECTED[kind]) for each, kind in zip(found, ("clean", "clean", "scale_only"), strict=True)
        ]
        if not all(right):
            wrong.append([(each.component, each.chosen) for each in found])
    assert not wrong


def test_a_stale_scale_and_a_move_since_are_named_by_what_holds_most_or_not_at_all() -> None:
    """Two faults: between .4 and .6 of the energy either name will do, elsewhere only the larger one's."""
    seen: set[Component] = set()
    for drift in (0.1, 0.2, 0.4, 0.6, 1.2):
        for seed in range(8):
            x = drifted_scale(ROWS, K, torch.Generator().manual_seed(seed), drift=drift)
            found, moved = judge(x, "rceil"), drift_share(x)
            allowed = {Component.MIXED}
            allowed |= {Component.SCALE} if moved < 0.6 else set()
            allowed |= {Component.GRID} if moved > 0.4 else set()
            assert found.component in allowed, (drift, seed, moved, found.shares)
            seen.add(found.component)
    assert seen >= {Component.SCALE, Component.GRID}


def test_balanced_mix_of_three_is_mixed() -> None:
    def plant(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        parts = [make(16, K, generator) for make in (scale_only, grid_only, deadzone_only)]
        energies = [error_energy(part) for part in parts]
        return torch.cat([part * (energies[0] / e) ** 0.5 for part, e in zip(parts, energies, strict=True)])

    # Scaling by no power of two moves the scale, so the parts are only near a third each.
    x = plant(0)
    judgement = judge(x, "rceil")
    assert max(judgement.shares["zeroed"], judgement.shares["scale"], judgement.shares["grid"]) < 0.5
    assert judgement.component is Component.MIXED


def test_gaussian_tensor_is_grid_noise_at_its_level() -> None:
    judgement = judge(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), "rceil")
    assert judgement.component is Component.GRID
    assert judgement.nmse == pytest.approx(0.0133, rel=0.05)


def test_all_zero_tensor_is_clean() -> None:
    judgement = judge(torch.zeros(4, 64), "rceil")
    assert judgement.component is Component.NONE
    assert judgement.chosen == ()
