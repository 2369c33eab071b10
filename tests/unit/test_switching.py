"""Switching the recipe of a live run: what is refused, and what happens at the boundary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mxprobe
from mxprobe.agent.parts.recipe_switch import RecipeSwitch, Request, emulations_of
from mxprobe.emulation.api import active


class Told:
    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.events: list[tuple[str, str]] = []
        self.switch = RecipeSwitch(self.answers.append, lambda event: self.events.append((event.kind, event.words)))

    def ask(self, line: str, *, at_step: int = 0, step: int = 5, is_trainer: bool = True) -> None:
        self.switch.ask(Request(len(self.answers) + 1, line, at_step), step=step, is_trainer=is_trainer)


@pytest.fixture
def told() -> Iterator[Told]:
    yield (told := Told())
    told.switch.close()


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield (net := nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    for emulation in emulations_of([net]):
        emulation.remove()
    assert active() == []


def test_a_model_is_emulated_at_the_boundary_switched_and_taken_to_none(told: Told, model: nn.Module) -> None:
    x = torch.randn(4, 32)
    plain = model(x)
    told.ask("paper")
    assert torch.equal(model(x), plain)
    told.switch.at_boundary([model], 6)
    noisy = model(x)
    assert not torch.equal(noisy, plain)
    told.ask("paper x_fwd=none")
    told.switch.at_boundary([model], 7)
    assert not torch.equal(model(x), noisy)
    told.ask("none")
    told.switch.at_boundary([model], 8)
    assert torch.equal(model(x), plain)
    assert [(a["ok"], a["step"], a["models"][0]["was"]) for a in told.answers] == [
        (True, 6, ""),
        (True, 7, "paper"),
        (True, 8, "paper x_fwd=none"),
    ]
    assert [detail.partition(" · ")[0] for _, detail in told.events] == ["paper", "paper x_fwd=none", "none"]


def test_a_step_is_waited_for(told: Told, model: nn.Module) -> None:
    told.ask("paper", at_step=9)
    for step in (6, 7, 8):
        told.switch.at_boundary([model], step)
        assert not told.answers
    told.switch.at_boundary([model], 9)
    assert told.answers[0]["step"] == 9


def test_a_switch_by_hand_is_an_event_too(told: Told, model: nn.Module) -> None:
    emulation = mxprobe.emulate(model, "paper")
    told.switch.at_boundary([model], 1)
    told.switch.at_boundary([model], 2)
    emulation.set("none", now=True)
    told.switch.at_boundary([model], 3)
    assert [detail.partition(" · ")[0] for _, detail in told.events] == ["paper", "none"]


@pytest.mark.parametrize(
    ("line", "options", "reason", "words"),
    [
        ("papr", {}, "unreadable", "no recipe named 'papr'"),
        ("paper", {"is_trainer": False}, "no_steps", "without an optimizer"),
        ("paper", {"at_step": 5}, "late", "completed step 5"),
    ],
)
def test_refused_at_once(told: Told, line: str, options: dict[str, Any], reason: str, words: str) -> None:
    told.ask(line, **options)
    assert (told.answers[0]["ok"], told.answers[0]["reason"]) == (False, reason)
    assert words in told.answers[0]["detail"]


def test_one_rank_alone_is_refused(told: Told, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    told.ask("paper")
    assert told.answers[0]["reason"] == "ranks"
    assert "rank 2 of 4" in told.answers[0]["detail"]
    told.ask("paper", at_step=8)
    told.switch.at_boundary([model], 8)
    assert told.answers[1]["ok"]


def test_one_request_at_a_time_and_none_after_leaving(told: Told) -> None:
    told.ask("paper", at_step=50)
    told.ask("none")
    assert told.answers[0]["reason"] == "busy"
    told.switch.leave("asked")
    assert (told.answers[1]["reason"], told.answers[1]["detail"]) == ("left", "the probe left first: asked")


@pytest.mark.parametrize(
    ("net", "reason", "words"),
    [
        (lambda: torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager"), "compiled", "inside torch.compile"),
        (lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2)), "fused", "0 multiplies in a fused kernel"),
        (lambda: nn.Sequential(nn.ReLU()), "no_fit", "applies to no module"),
    ],
)
def test_a_model_that_a_switch_would_not_reach_is_refused(told: Told, net: Any, reason: str, words: str) -> None:
    told.ask("paper")
    told.switch.at_boundary([net()], 6)
    assert (told.answers[0]["ok"], told.answers[0]["reason"]) == (False, reason)
    assert words in told.answers[0]["detail"]
    assert told.events == []


def test_the_step_hook_goes_with_the_last_emulation(told: Told, model: nn.Module) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = len(_global_optimizer_post_hooks)
    told.ask("paper")
    assert len(_global_optimizer_post_hooks) == before + 1
    told.switch.at_boundary([model], 6)
    told.switch.close()
    assert len(_global_optimizer_post_hooks) == before + 1
    for emulation in emulations_of([model]):
        emulation.remove()
    assert len(_global_optimizer_post_hooks) == before
