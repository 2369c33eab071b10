"""Routing replay: the forward takes another one's experts, weighted as each router would; what it cannot do it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.measuring.adapters.expert_structure import is_router
from mxprobe.measuring.replay.arms import ROUTED, replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.expert_forwards import RoutingReplay
from tests.moe_models import tiny, tokens


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_router(module)]


def chosen_in(model: nn.Module, x: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    """The experts that each router's layer was sent, in a forward."""
    found: list[torch.Tensor] = []
    experts = [m for name, m in model.named_modules() if name.endswith("mlp.experts")]
    handles = [m.register_forward_pre_hook(lambda _, args: found.append(args[1].clone())) for m in experts]
    with torch.no_grad():
        model(input_ids=x, **how)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_a_forward_with_its_own_choice_replayed_is_the_same_forward(family: str):
    model, x = tiny(family), tokens(2, 9)
    routing = RoutingReplay(model)
    with routing.recording():
        before = model(input_ids=x).logits
    with routing.replaying():
        after = model(input_ids=x).logits
    assert routing.is_whole is not None
    assert bool(routing.is_whole)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_experts_are_those_of_the_other_forward_and_their_weights_the_router_s_own():
    model, x = tiny(), tokens(2, 9)
    routing = RoutingReplay(model)
    with routing.recording():
        wanted = chosen_in(model, x)
    for router in routers_of(model):
        router.weight.add_(0.1 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    assert any(not torch.equal(a, b) for a, b in zip(chosen_in(model, x), wanted, strict=True))
    weighted: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    with routing.replaying():
        handles = [r.register_forward_hook(lambda _m, _x, out: weighted.append(out)) for r in routers_of(model)]
        found = chosen_in(model, x)
    for handle in handles:
        handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for logits, weights, experts in weighted:
        scores = logits.float().softmax(-1).gather(-1, experts)
        wanted_weights = scores / scores.sum(-1, keepdim=True) if model.config.norm_topk_prob else scores
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-4, atol=1e-6)
    assert not any(router._forward_hooks for router in routers_of(model))


class Unlike(nn.Module):
    """A router whose weights are no function of its logits that is known here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> Any:
        logits = x @ self.weight.T
        weights, experts = logits.topk(2)
        return logits, weights.square() + 1, experts


Unlike.__name__ = "UnlikeRouter"


@torch.no_grad()
def test_a_router_whose_weights_are_not_understood_keeps_its_choice_and_says_so():
    router, x = Unlike(), torch.randn(5, 8)
    routing = RoutingReplay(router)
    with routing.recording():
        router(x)
    router.weight.neg_()
    wanted = router(x)
    with routing.replaying():
        found = router(x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert routing.is_whole is not None
    assert not bool(routing.is_whole)


def test_a_replay_says_what_routing_replay_would_leave_of_the_mismatch():
    model, x = tiny(), tokens(4, 16)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name}
    with torch.enable_grad():
        call = capture(model, (), {"input_ids": x})
    arms = {arm.name: arm for arm in replay_arms(call, linears, ("q", ROUTED))}
    assert arms[ROUTED].holds
    assert not arms[ROUTED].gradients
    plain, routed = (arms[name].row()["sum_kl"] for name in ("q", ROUTED))
    assert 0 < routed < plain
    dense = nn.Sequential(nn.Linear(8, 8))
    assert not RoutingReplay(dense).is_possible
