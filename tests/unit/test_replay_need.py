"""A replay's need is told before it runs, is an upper bound of what is alive in it, and decides whether it runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.agent import allocator
from mxprobe.agent.memory import RESERVED, DeviceMemory
from mxprobe.agent.parts.replays import Replays
from mxprobe.agent.replay_allowance import shapes_of
from mxprobe.measuring import compat
from mxprobe.measuring.replay.arms import replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.gradient_probes import probe_gradients
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.measuring.replay.sensitivity import measure_sensitivity
from mxprobe.protocol import AgentConfig
from tests import part_context, small_lm
from tests.live_bytes import LiveBytes


def model_of(width: int, n_layers: int, vocabulary: int, dtype: torch.dtype) -> nn.Module:
    model = small_lm.SmallLM(width=width, n_layers=n_layers)
    model.head = nn.Linear(width, vocabulary, bias=False)
    return model.to(dtype)


def all_linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize(
    ("width", "n_layers", "vocabulary", "n_samples", "dtype"),
    [(64, 2, 22, 8, torch.float32), (64, 2, 2000, 8, torch.float32), (128, 2, 100, 16, torch.bfloat16)],
)
def test_no_replay_holds_more_than_its_need(
    monkeypatch: pytest.MonkeyPatch, width: int, n_layers: int, vocabulary: int, n_samples: int, dtype: torch.dtype
):
    monkeypatch.setattr(compat, "without_dispatch_modes", nullcontext)  # it would leave the count
    model, ids = model_of(width, n_layers, vocabulary, dtype), small_lm.batch(n_samples, 0)
    linears, call = all_linears(model), capture(model, (), {"input_ids": ids})
    logits = model(ids)
    logits.retain_grad()
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    gradient = PolicyGradient(logits.grad, None)
    shapes = shapes_of(call, linears, tuple(logits.shape), None)
    with LiveBytes() as live:
        measure_sensitivity(call, linears, max_rows=1 << 20, corrections=("mxfp8",))
    assert live.peak <= shapes.of_sensitivity(n_samples) <= 4 * live.peak
    with LiveBytes() as live:
        list(replay_arms(call, linears, ("q", "q_weights"), gradient=gradient))
    assert live.peak <= shapes.of_arms(0) <= 4 * live.peak
    with LiveBytes() as live:
        probe_gradients(call, linears, gradient, n_probes=1)
    assert live.peak <= shapes.of_arms(1) <= 4 * live.peak


def replayed(
    limit: int, *, n_samples: int = 8, busy: bool = False, **config: Any
) -> tuple[list[str], DeviceMemory, bool]:
    """One step whose replay has that limit, as on a GPU; what was told, and whether something was replayed."""
    memory = DeviceMemory(0, lambda *_: None)
    memory.device, memory.limit = "cuda", limit
    told = part_context.told(AgentConfig(**{"sensitivity_every": 1, **config}), memory=memory)
    told.context.worker.backlog = int(busy)
    clock = told.context.clock
    model = small_lm.SmallLM(width=32, n_layers=1)
    replays = Replays(told.context, lambda: small_lm.linears(model))
    replays.watch([model])
    made = False
    for _ in range(2):
        replays.begin()
        model(small_lm.batch(n_samples, clock.step)).sum().backward()
        clock.advance()
        rows = replays.run()
        made = made or rows is not None
        if rows is not None:
            rows()
        clock.next()
    return told.details + told.errors, memory, made


def test_what_fits_is_replayed_and_the_estimate_is_told():
    told, memory, made = replayed(1 << 30)
    assert made
    assert f"held {memory.replay_peak / 1e6:.1f} MB at most (estimated)" in told[0]
    assert memory.skipped == ""
    assert f"a replay of {memory.replay_peak / 1e6:.1f} MB at most" in memory.words()


def test_fewer_samples_are_replayed_where_all_do_not_fit():
    _, whole, _ = replayed(1 << 30)
    limit = int(0.7 * whole.replay_peak / (1 - RESERVED))
    told, memory, made = replayed(limit)
    assert made
    assert 0 < memory.replay_peak <= 0.7 * whole.replay_peak
    assert not any(detail.startswith("no ") for detail in told), told


def test_what_never_fits_is_skipped_with_the_number():
    told, memory, made = replayed(1 << 16)
    assert not made
    (detail,) = told
    assert detail.startswith("no sensitivity: a replay for sensitivity would hold ")
    assert "--max-gpu-memory leaves 0.1 MB for it; skipped" in detail
    assert memory.skipped in memory.words()


def test_sensitivity_goes_on_without_the_arms_that_do_not_fit():
    _, sensitivity, _ = replayed(1 << 30)
    _, both, _ = replayed(1 << 30, replay_every=1)
    assert both.replay_peak > sensitivity.replay_peak
    told, memory, made = replayed(int(1.05 * sensitivity.replay_peak / (1 - RESERVED)), replay_every=1)
    assert made
    assert memory.replay_peak == pytest.approx(sensitivity.replay_peak, rel=0.01)  # and the gradient kept for the arms
    assert any(detail.startswith("no replays: a replay under other roundings would hold ") for detail in told)


def test_copies_that_are_not_measured_yet_put_a_replay_off():
    told, memory, made = replayed(1 << 30, busy=True)
    assert (told, made, memory.skipped) == ([], False, "")


def test_the_allocator_s_peak_is_compared_and_never_set_back():
    before = {allocator.ALLOCATED: 100, allocator.PEAK: 500}
    assert allocator.held_between(before, {allocator.ALLOCATED: 100, allocator.PEAK: 500}) == (0, 0)
    assert allocator.held_between(before, {allocator.ALLOCATED: 110, allocator.PEAK: 620}) == (120, 520)
    segments = [{"stream": 7, "total_size": 20}, {"stream": 0, "total_size": 100}, {"stream": 7, "total_size": 2}]
    assert allocator.reserved_for(7, segments) == 22
    documented = f"{torch.cuda.memory_stats.__doc__}"
    assert "allocated_bytes.{all,large_pool,small_pool}.{current,peak,allocated,freed}" in documented
    assert "reserved_bytes.{all,large_pool,small_pool}.{current,peak,allocated,freed}" in documented
    assert allocator.free_bytes(torch.device("cpu")) is None
