"""One budget for all copies: what fits is taken, the rest has its turn, and what was held is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mxprobe.agent.allocator import Held
from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.memory import DeviceMemory, bytes_of
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.measuring.operands import copying, extent, pieces, weights
from mxprobe.measuring.operands.extent import BYTES_OF_BATCH
from mxprobe.measuring.operands.operand import Operand, measure_operand
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role
from mxprobe_kernels import cpu_backend, cpu_quantizer
from mxprobe_kernels.formats import E2M1_GRID
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS
from tests.live_bytes import LiveBytes

K = 256


def probes(n: int, sent: list[Any], *, max_rows: int = 512, dtype: torch.dtype = torch.float32) -> list[ModuleProbe]:
    clock = Clock()
    clock.probed = clock.with_weights = True
    guard = Guard(10, lambda *_: None, lambda: None)
    how: dict[str, Any] = {"clock": clock, "guard": guard, "submit": sent.append, "trains": True}
    modules = [nn.Linear(K, K, bias=False, dtype=dtype) for _ in range(n)]
    return [ModuleProbe(f"m{i}", m, max_rows=max_rows, max_features=512, **how) for i, m in enumerate(modules)]


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU by the code for a device, in pieces small enough for tensors that are."""
    monkeypatch.setattr(pieces, "on_host", lambda x: False)
    monkeypatch.setattr(pieces, "DEVICE_BATCH_ELEMENTS", 1 << 12)
    for module in (cpu_backend, cpu_quantizer):
        monkeypatch.setattr(module, "supports", lambda *_: False)
    monkeypatch.setattr(copying, "CPU_MAX_ROWS", 1 << 30)
    monkeypatch.setattr(weights, "CPU_MAX_FEATURES", 1 << 30)


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
    memory = DeviceMemory(0, lambda event: told.append(f"{event.kind}: {event.words}"))
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
    before, working = made[0].sample_bytes, made[0].working_bytes
    assert not made[0].shrink(before + working)
    assert made[0].shrink(working - 1)
    assert made[0].sample_bytes + made[0].working_bytes < working
    assert probes(1, [], dtype=torch.bfloat16)[0].sample_bytes == before // 2


def test_on_a_gpu_no_module_takes_more_than_there_is():
    told: list[str] = []
    (probe,) = probes(1, [])
    memory = DeviceMemory(0, lambda event: told.append(event.words))
    memory.device, memory.limit = "cuda", (probe.sample_bytes + probe.working_bytes) * 3 // 4
    assert memory.choose([probe], 1.0) == [probe]
    assert probe.sample_bytes + probe.working_bytes <= memory.limit
    memory.limit = 1024
    assert memory.choose([probe], 1.0) == []
    assert told


def test_copies_that_were_larger_than_their_bound_make_the_next_steps_smaller():
    made = probes(8, [])
    memory = DeviceMemory(0, lambda *_: None)
    one, working = made[0].sample_bytes, made[0].working_bytes
    memory.device, memory.limit = "cuda", (working + 5 * one) * 8 // 7 + 8
    assert len(memory.choose(made, 1.0)) == 5  # an eighth is left for what else is copied
    memory.device = "cpu"
    memory.take(torch.zeros(memory.limit // 2))  # twice the limit
    memory.device = "cuda"
    assert 0 < len(memory.choose(made, 1.0)) < 5 or made[0].sample_bytes < one
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


@pytest.mark.parametrize(
    ("out_features", "in_features", "features"), [(256, 256, 128), (768, 256, 128), (512, 512, 64)]
)
def test_measuring_takes_no_more_than_foreseen(
    monkeypatch: pytest.MonkeyPatch, out_features: int, in_features: int, features: int
):
    on_a_device(monkeypatch)
    sent: list[Any] = []
    (probe,) = probes(1, sent, max_rows=64)
    probe.module = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)
    probe._max_features = features  # pyright: ignore[reportPrivateUsage]
    probe.arm()
    probe.module(torch.randn(600, in_features, dtype=torch.bfloat16)).sum().backward()
    probe.finish_step()
    (one,) = sent
    assert one.single(one.x).shape[0] == 64
    with torch.no_grad(), LiveBytes() as live:
        config = AgentConfig(whatifs=(*DEFAULT_WHATIFS, "hif4", "mxfp4_4over6"))
        n = sum(1 for _ in measure_step(sent, config, recipes={}, history=WeightHistory()))
    assert n > 50
    batch = BYTES_OF_BATCH * (extent.DEVICE_BATCH_ELEMENTS - pieces.DEVICE_BATCH_ELEMENTS)
    foreseen = probe.working_bytes - batch
    assert foreseen / 3 < live.peak <= foreseen


def test_sums_are_the_same_by_pieces(monkeypatch: pytest.MonkeyPatch):
    a, b = torch.randn(1, 96, K), torch.randn(1, K, 40)
    operand = Operand(Role.X_FWD, a, b, 0.5, 96, n_certain=30, certain_weight=0.25)

    def rows() -> tuple[Any, Any]:
        measured = measure_operand(operand, format="mxfp4", rule="floor")
        return measured.row, next(iter(measure_corrections([measured], ("of:0.5", "nvfp4", "mbs:128"))))

    monkeypatch.setattr(cpu_backend, "supports", lambda *_: False)  # its sums are of float32
    whole = rows()
    on_a_device(monkeypatch)
    pieces = rows()
    for name, value in whole[0].items():
        assert pieces[0][name] == pytest.approx(value, rel=1e-9), name
    for piece, each in zip(pieces[1], whole[1], strict=True):
        assert piece.pop("correction") == each.pop("correction")
        assert piece == pytest.approx(each, rel=1e-9)


def test_what_the_allocator_keeps_for_measuring_counts_and_makes_the_next_steps_smaller():
    made = probes(8, [])
    one, working = made[0].sample_bytes, made[0].working_bytes
    memory = DeviceMemory(0, lambda *_: None)
    memory.device, memory.limit = "cuda", (working + 5 * one) * 8 // 7 + 8
    assert len(memory.choose(made, 1.0)) == 5
    memory.measured(working // 2)
    assert len(memory.choose(made, 1.0)) == 5
    memory.measured(working + 2 * one)
    assert 0 < len(memory.choose(made, 1.0)) < 5
    assert memory.peak_bytes == working + 2 * one
    assert f"{(working + 2 * one) / 1e6:.1f} MB to measure them" in memory.words()


def test_a_replay_has_the_room_that_copies_and_measuring_leave():
    memory = DeviceMemory(0, lambda *_: None)
    assert memory.room_for_replay(busy=False) is None  # on a CPU there is no limit for it
    memory.device, memory.limit = "cuda", 800
    assert memory.room_for_replay(busy=False) == (700, 700)
    assert memory.room_for_replay(busy=True) == (0, 700)
    assert memory.room_for_replay(busy=False, free=50) == (50, 700)
    memory.measured(100)
    assert memory.room_for_replay(busy=False) == (600, 600)
    memory.replayed(100, Held(raised=10, at_most=200))
    assert memory.room_for_replay(busy=False) == (300, 300)
    assert (memory.replay_peak, memory.peak_bytes) == (200, 300)
