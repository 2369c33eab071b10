"""When a replay is due, that it waits until it can be afforded, and what is said of the ones that are off."""

from __future__ import annotations

import pytest
import torch

from mxprobe.agent.clock import Clock
from mxprobe.agent.parts.replays import Replays
from mxprobe.protocol import AgentConfig
from tests import part_context, small_lm


def watched(config: AgentConfig) -> tuple[Replays, Clock, torch.nn.Module, part_context.Told]:
    told = part_context.told(config)
    model = small_lm.SmallLM(width=32, n_layers=1)
    replays = Replays(told.context, lambda: small_lm.linears(model))
    replays.watch([model])
    return replays, told.context.clock, model, told


def take_step(replays: Replays, clock: Clock, model: torch.nn.Module, *, affordable: bool = True) -> bool:
    """One training step; whether something was replayed."""
    clock.is_affordable = affordable
    replays.begin()
    model(small_lm.batch(2, clock.step)).sum().backward()
    clock.advance()
    made = replays.run() is not None
    clock.next()
    return made


def test_by_default_the_first_comes_after_a_tenth_of_the_period_and_the_next_after_a_whole_one():
    replays, clock, model, told = watched(AgentConfig())
    replayed = [clock.step for _ in range(222) if take_step(replays, clock, model)]
    assert [step - 1 for step in replayed] == [21, 221]
    assert any("replays under other roundings are off: one would take about" in detail for detail in told.details)
    assert told.errors == []


def test_what_cannot_be_afforded_stays_due():
    replays, clock, model, _ = watched(AgentConfig(sensitivity_every=2))
    assert not take_step(replays, clock, model, affordable=False)
    assert take_step(replays, clock, model)
    assert not take_step(replays, clock, model)


@pytest.mark.parametrize(("every", "on"), [(0, False), (1, True)])
def test_never_means_never(every: int, on: bool):
    replays, clock, model, told = watched(AgentConfig(sensitivity_every=every))
    assert take_step(replays, clock, model) is on
    assert bool(told.events) is on
