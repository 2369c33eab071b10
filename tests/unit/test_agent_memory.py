"""One budget for all copies: what fits is taken, the rest has its turn, and what was held is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.hooks import ModuleProbe
from mxprobe.agent.memory import DeviceMemory, bytes_of
from mxprobe.agent.snapshot import Snapshot
from mxprobe_kernels.formats import E2M1_GRID

K = 256


def probes(n: int, sent: list[Any], *, max_rows: int = 512, dtype: torch.dtype = torch.float32) -> list[ModuleProbe]:
    clock = Clock()
    clock.probed = clock.with_weights = True
    guard = Guard(10, lambda *_: None, lambda: None)
    how: dict[str, Any] = {"clock": clock, "guard": guard, "submit": sent.append, "trains": True}
    modules = [nn.Linear(K, K, bias=False, dtype=dtype) for _ in range(n)]
    return [ModuleProbe(f"m{i}", m, max_rows=max_rows, max_features=512, **how) for i, m in enumerate(modules)]


@dataclass
class Copied:
    x: torch.Tensor
    same: torch.Tensor
    more: list[Any]


class Named(NamedTuple):
    y: torch.Tensor


def test_every_tensor_of_a_copy_is_counted_once_and_those_elsewhere_are_not():
    x, y = torch.zeros(100), torch.zeros(7, dtype=torch.float64)
    assert bytes_of(Copied(x, x, [Named(y), {"k": torch.zeros(3, dtype=torch.uint8)}, 5]), "cpu") == 400 + 56 + 3
    assert bytes_of([torch.zeros(5, device="meta"), x], "cpu") == 400
    assert bytes_of(E2M1_GRID, "cpu") == 0


def test_modules_take_turns_within_the_limit_and_that_is_told():
    told: list[str] = []
    made = probes(6, [])
    one = made[0].sample_bytes
    memory = DeviceMemory(0, lambda kind, detail: told.append(f"{kind}: {detail}"))
    memory.limit = 2 * one + 1
    seen: list[str] = []
    for step in range(3):
        for probe in memory.choose(made, 1.0):
            probe.last_probed = step
            seen.append(probe.name)
    assert seen == [f"m{i}" for i in range(6)]
    (words,) = told
    assert words.startswith("thinned: a probed step measures 2 of 6 modules, in turn: ")
    assert [len(memory.choose(made, 0.1)), len(memory.choose(made, 1.0))] == [1, 2]


def test_nothing_is_thinned_without_a_limit():
    memory = DeviceMemory(0, lambda *_: pytest.fail("told"))
    memory.limit = 0
    assert len(memory.choose(probes(40, []), 1.0)) == 40


def test_a_module_that_does_not_fit_is_measured_on_fewer_rows_and_features():
    made = probes(2, [])
    before = made[0].sample_bytes
    assert not made[0].shrink(before)
    assert made[0].shrink(before // 3)
    assert made[0].sample_bytes <= before // 3
    assert probes(1, [], dtype=torch.bfloat16)[0].sample_bytes == before // 2


def test_on_a_gpu_no_module_takes_more_than_there_is():
    told: list[str] = []
    (probe,) = probes(1, [])
    memory = DeviceMemory(0, lambda kind, detail: told.append(detail))
    memory.device, memory.limit = "cuda", probe.sample_bytes // 4
    assert memory.choose([probe], 1.0) == [probe]
    assert probe.sample_bytes <= memory.limit
    memory.limit = 1024
    assert memory.choose([probe], 1.0) == []
    assert told


def test_copies_that_were_larger_than_their_bound_make_the_next_steps_smaller():
    made = probes(8, [])
    memory = DeviceMemory(0, lambda *_: None)
    memory.device, memory.limit = "cuda", 8 * made[0].sample_bytes
    assert len(memory.choose(made, 1.0)) == 7  # an eighth is left for what else is copied
    memory.device = "cpu"
    memory.take(torch.zeros(memory.limit // 2))  # twice the limit
    memory.device = "cuda"
    assert len(memory.choose(made, 1.0)) == 3
    assert memory.peak == 2 * memory.limit


def test_the_peak_is_of_what_is_held_at_once():
    sent: list[Snapshot] = []
    (probe,) = probes(1, sent)
    memory = DeviceMemory(0, lambda *_: None)
    let_go = memory.hold([torch.zeros(1000)])
    memory.hold(torch.zeros(500))()
    memory.choose([probe], 1.0)
    probe.arm()
    probe.module(torch.randn(64, K)).sum().backward()
    probe.finish_step()
    (snapshot,) = sent
    memory.take(snapshot)
    assert memory.peak == max(6000, 4000 + bytes_of(snapshot, "cpu"))
    # x, y and G of all rows; W whole, its watched features among it
    assert bytes_of(snapshot, "cpu") >= 4 * (3 * 64 * K + K * K)
    assert bytes_of(snapshot, "cpu") <= probe.sample_bytes
    let_go()
    memory.choose([probe], 1.0)
    assert memory.peak == 4000 + bytes_of(snapshot, "cpu")
    assert memory.words() == f"copies of {memory.peak / 1e6:.1f} MB at once at most, in memory of cpu, limit 1073.7 MB"
