"""Which norms the flight recorder takes, and of what."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mxprobe.agent.guard import Guard
from mxprobe.agent.parts.flight import NormTaps
from mxprobe.measuring.flight_memory import Entry


class Net(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return self.last(self.act(self.first(x)))

        return checkpoint(body, x, use_reentrant=self.how == "reentrant") if self.how else body(x)


class Recorded:
    def __init__(self, net: nn.Module, left_alone: Collection[int] = ()) -> None:
        self.net = net
        self.errors: list[Any] = []
        guard = Guard(10, lambda where, detail: self.errors.append((where, detail)), lambda: None)
        self.taps = NormTaps(guard)
        self.taps.watch([net], set(left_alone))

    def entry(self) -> Entry:
        norms = self.taps.take(step=1)
        assert not self.errors
        return Entry.read(norms)


@pytest.mark.parametrize("how", ["", "reentrant", "plain"])
def test_each_output_and_each_gradient_once(how: str) -> None:
    torch.manual_seed(0)
    recorded = Recorded(Net(how))
    outputs: dict[str, torch.Tensor] = {}
    for name, module in recorded.net.named_children():
        module.register_forward_hook(lambda _m, _a, y, name=name: outputs.update({name: y.detach().clone()}))
    recorded.net(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    entry = recorded.entry()
    assert list(entry.outputs) == ["first", "act", "last"]
    for name, (norm, n) in entry.outputs.items():
        assert (norm, n) == (pytest.approx(outputs[name].norm().item()), outputs[name].numel())
    for name, parameter in recorded.net.named_parameters():
        assert parameter.grad is not None
        assert entry.gradients[name] == (pytest.approx(parameter.grad.norm().item()), parameter.numel())
    assert len(entry.gradients) == 4


def test_of_several_calls_the_largest_and_a_nan_in_any() -> None:
    recorded = Recorded(nn.Sequential(nn.Identity()))
    for value in (1.0, 3.0, 2.0):
        recorded.net(torch.full((4,), value))
    assert recorded.entry().outputs == {"0": (6.0, 4)}
    for value in (1.0, float("nan"), 2.0):
        recorded.net(torch.full((4,), value))
    assert not recorded.entry().outputs["0"][0] < float("inf")


def test_generation_and_evaluation_are_not_listened_to() -> None:
    recorded = Recorded(Net())
    with torch.no_grad():
        recorded.net(torch.randn(3, 8))
    recorded.net.first(torch.randn(3, 8))  # not through the root
    assert recorded.entry().outputs == {}


def test_a_forward_that_fails_leaves_nothing_open() -> None:
    recorded = Recorded(Net())
    with pytest.raises(RuntimeError):
        recorded.net(torch.randn(3, 7))
    with torch.no_grad():
        recorded.net.first(torch.randn(3, 8))
    assert recorded.entry().outputs == {}


def test_modules_to_be_left_alone_get_no_hook() -> None:
    net = Net()
    recorded = Recorded(net, {id(net.first)})
    net(torch.randn(3, 8))
    assert list(recorded.entry().outputs) == ["act", "last"]
    recorded.taps.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_norms_of_half_precision_do_not_overflow() -> None:
    recorded = Recorded(nn.Sequential(nn.Identity()).to(torch.float16))
    recorded.net(torch.full((1 << 10,), 6e4, dtype=torch.float16))
    assert recorded.entry().outputs["0"][0] == pytest.approx(6e4 * 32, rel=1e-3)
    net = nn.Linear(4, 4).to(torch.float16)
    recorded = Recorded(net)
    net.weight.grad = torch.full((4, 4), 6e4, dtype=torch.float16)
    assert recorded.entry().gradients["Linear.weight"][0] == pytest.approx(2.4e5, rel=1e-3)
