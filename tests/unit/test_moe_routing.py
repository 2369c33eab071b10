"""Flips of a router's choice: counted against the choice itself, and not told where it is not by the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.router_probe import RouterProbe, probe_of
from mxprobe.measuring.adapters.expert_structure import is_router
from mxprobe.measuring.moe.routing import routing_row
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.recipes import quantize
from tests.moe_models import tiny


def snapshot_of(router: Any, x: torch.Tensor) -> Snapshot:
    clock, errors, sent = Clock(), [], []
    probe = probe_of(router, every_expert=False)(
        "gate",
        router,
        clock=clock,
        guard=Guard(10, lambda where, detail: errors.append(detail), lambda: None),
        submit=sent.append,
        max_rows=4096,
        max_features=4096,
        trains=False,
    )
    assert isinstance(probe, RouterProbe)
    clock.probed = True
    probe.arm()
    with torch.no_grad():
        router(x)
    probe.finish_step()
    assert not errors
    (snapshot,) = sent
    return snapshot


def test_predicted_and_observed_flips_are_those_of_the_choice_itself():
    router = tiny(experts=8).model.layers[0].mlp.gate
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    row = routing_row(snapshot_of(router, x), format="mxfp4", rule="rceil")
    assert row is not None
    w = router.weight.detach()
    z = x.double() @ w.double().T
    q = quantize(x, "mxfp4+rceil").double() @ quantize(w, "mxfp4+rceil").double().T
    before, after = (set_of(logits.topk(2).indices) for logits in (z, q))
    exchanged = [len(a - b) for a, b in zip(before, after, strict=True)]
    assert row["by_logits"]
    assert row["n_tokens"] == 100
    assert row["n_predicted"] == sum(n > 0 for n in exchanged) > 5
    assert row["n_slots_predicted"] == sum(exchanged)
    assert row["n_observed"] == row["n_slots_observed"] == 0
    ordered = z.sort(1, descending=True).values
    assert row["sum_margin"] == pytest.approx(float((ordered[:, 1] - ordered[:, 2]).sum()))
    assert 0.4 < row["sum_chance"] / row["n_predicted"] < 2.5


def set_of(chosen: torch.Tensor) -> list[set[int]]:
    return [set(each) for each in chosen.tolist()]


def test_a_choice_that_is_not_by_the_largest_logits_has_no_flips_to_tell():
    router = BalancedRouter(tiny(experts=8).model.layers[0].mlp.gate)
    row = routing_row(snapshot_of(router, torch.randn(100, 64)), format="mxfp4", rule="rceil")
    assert row is not None
    assert not row["by_logits"]
    assert row["n_predicted"] is None
    assert row["n_observed"] is None
    assert row["sum_margin"] > 0


class BalancedRouter(torch.nn.Module):
    """As DeepSeek V3's: a bias that only the choice sees."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = router.weight
        self.bias_of_choice = torch.linspace(-2, 2, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x, self.weight)
        scores = logits.sigmoid()
        chosen = (scores + self.bias_of_choice).topk(2).indices
        return logits, scores.gather(1, chosen), chosen


class TokenRouter(torch.nn.Module):
    """Keeps the axes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def test_logits_may_have_the_axes_of_the_input():
    router, x = TokenRouter(), torch.randn(3, 20, 64)
    snapshot = snapshot_of(router, x)
    assert torch.equal(snapshot.x, x.reshape(60, 64))
    assert snapshot.y is not None
    assert torch.equal(snapshot.y, router(x).detach().reshape(60, 8))


@pytest.mark.parametrize(
    ("name", "router"),
    [
        *((name, True) for name in ("Qwen3MoeTopKRouter", "DeepseekV3TopkRouter", "MoEGate", "gate", "router")),
        *((name, False) for name in ("Aggregate", "Propagate", "Surrogate", "Gated")),
    ],
)
def test_a_router_is_told_by_its_name(name: str, router: bool):
    module: Any = type(name, (torch.nn.Module,), {})()
    module.weight = torch.nn.Parameter(torch.randn(4, 8))
    assert is_router(module) == router
