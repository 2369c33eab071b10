"""Which calls of a module become which snapshots."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.measuring.operands.snapshot import Snapshot


class Watched:
    """One probed Linear, and what was handed over."""

    def __init__(self, *, trains: bool = True, module: nn.Linear | None = None) -> None:
        self.module = module or nn.Linear(8, 4)
        self.clock = Clock()
        self.errors: list[str] = []
        self.sent: list[Snapshot] = []
        self.probe = ModuleProbe(
            "linear",
            self.module,
            clock=self.clock,
            guard=Guard(10, lambda where, detail: self.errors.append(f"{where}: {detail}"), lambda: None),
            submit=self.sent.append,
            max_rows=512,
            max_features=4096,
            trains=trains,
        )
        self.begin()

    def begin(self, *, only_outputs: bool = False) -> None:
        self.clock.probed, self.clock.only_outputs, self.clock.with_weights = not only_outputs, only_outputs, True
        self.probe.arm()

    def end(self) -> list[tuple[str, int]]:
        """(phase, rows there were) of what the step handed over."""
        self.probe.finish_step()
        self.probe.forget()
        self.clock.next()
        assert not self.errors
        sent = [(snapshot.phase, snapshot.n_rows) for snapshot in self.sent]
        self.sent.clear()
        return sent

    def train(self, *shape: int) -> None:
        self.module(torch.ones(*shape, 8)).sum().backward()

    @torch.no_grad()
    def infer(self, *shape: int) -> None:
        self.module(torch.ones(*shape, 8))

    def generate(self, batch: int, prompt: int, tokens: int) -> None:
        self.infer(batch, prompt)
        for _ in range(tokens):
            self.infer(batch, 1)


def test_a_training_call_comes_with_its_gradient():
    w = Watched()
    w.train(2, 5)
    (snapshot,) = w.sent
    assert snapshot.gradient is not None
    assert snapshot.gradient.shape == (10, 4)
    assert w.end() == [("train", 10)]
    assert w.probe.train_rows == 10


def test_only_the_first_micro_batch_is_measured_and_all_are_counted():
    w = Watched()
    w.train(2, 5)
    w.train(2, 7)
    assert w.end() == [("train", 10)]
    assert w.probe.train_rows == 24


def test_a_call_whose_gradient_never_comes_is_sent_at_the_end_of_the_step():
    w = Watched()
    w.module(torch.ones(3, 8))
    assert w.sent == []
    assert w.end() == [("train", 3)]


def test_generation_is_prefill_and_the_first_decode_step():
    w = Watched()
    w.generate(4, 6, 3)
    (snapshot,) = w.sent
    assert snapshot.x.shape == (*snapshot.y.shape[:1], 8) == (28, 8)
    assert not snapshot.with_operands
    w.train(4, 9)
    assert w.end() == [("rollout", 28), ("train", 36)]
    assert (w.probe.train_rows, w.probe.rollout_rows) == (36, 36)


def test_a_call_without_gradient_that_nothing_is_decoded_from_is_eval():
    w = Watched()
    w.infer(4, 9)
    w.train(4, 9)
    assert w.end() == [("eval", 36), ("train", 36)]
    assert w.probe.rollout_rows == 0


def test_log_probabilities_between_generation_and_training_are_eval():
    w = Watched()
    w.generate(4, 6, 3)
    w.infer(4, 9)
    w.train(4, 9)
    assert w.end() == [("rollout", 28), ("eval", 36), ("train", 36)]
    assert w.probe.rollout_rows == 36


def test_without_a_token_axis_other_modules_decide():
    generating, evaluating = Watched(), Watched()
    for w in (generating, evaluating):
        w.infer(30)
    generating.clock.n_decodes += 1  # another module saw a one-token call
    assert generating.end() == [("rollout", 30)]
    assert evaluating.end() == [("eval", 30)]


def test_a_step_watched_for_generation_alone_measures_outputs_alone():
    w = Watched()
    w.end()
    w.begin(only_outputs=True)
    w.train(2, 5)
    assert w.end() == []
    w.begin(only_outputs=True)
    w.generate(2, 3, 1)
    w.train(2, 5)
    assert not any(snapshot.with_operands for snapshot in w.sent)
    assert w.end() == [("rollout", 8), ("train", 10)]


def test_a_served_call_has_operands_and_no_gradient():
    w = Watched(trains=False)
    w.infer(1, 4)
    w.infer(1, 4)
    (snapshot,) = w.sent
    assert snapshot.with_operands
    assert w.end() == [("rollout", 4)]
    assert w.probe.rollout_rows == 8


def test_generation_is_seen_in_every_step_beside_reentrant_checkpointing():
    """The first pass of such a region runs without gradient, as a prefill does."""
    w = Watched()
    for _ in range(3):
        w.generate(1, 4, 2)
        w.infer(2, 7)
        x = torch.ones(2, 5, 8, requires_grad=True)
        for _ in range(2):  # micro batches
            checkpoint(w.module, x, use_reentrant=True).sum().backward()
        assert w.end() == [("rollout", 5), ("eval", 14), ("train", 10)]
        assert (w.probe.rollout_rows, w.probe.train_rows) == (6, 20)
        w.begin()


def test_passes_that_are_no_generation_are_not_counted_as_one():
    w = Watched()
    w.generate(1, 4, 2)
    for _ in range(3):
        w.infer(2, 7)
    w.train(2, 5)
    assert w.end() == [("rollout", 5), ("eval", 14), ("train", 10)]
    assert w.probe.rollout_rows == 6


def test_in_place_changes_after_the_call_do_not_reach_the_copy():
    w = Watched()
    x = torch.ones(3, 8)
    y = w.module(x)
    expected = y.detach().clone()
    nn.functional.relu_(y).sum().backward()
    x.zero_()
    (snapshot,) = w.sent
    assert torch.equal(snapshot.x, torch.ones(3, 8))
    assert torch.equal(snapshot.y, expected)


IN_PLACE = {
    "relu_": nn.functional.relu_,
    "dropout": lambda y: nn.functional.dropout(y, 0.5, inplace=True),
    "residual": lambda y: y.add_(torch.arange(y.numel()).view_as(y)),
    "view": lambda y: y.view(-1, 4).mul_(3.0).view_as(y),
    "slice": lambda y: (y[..., :2].mul_(0.0), y)[1],
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)])
def test_the_gradient_is_that_of_the_output_before_it_was_changed_in_place(change: str, shape: tuple[int, ...]):
    """With tokens in rows of a batch the output is a view: changed in place, it gets another gradient function."""
    w = Watched()
    x = torch.randn(*shape, 8)
    w.module.zero_grad()
    torch.manual_seed(1)
    IN_PLACE[change](w.module(x)).square().sum().backward()
    (snapshot,) = w.sent
    assert snapshot.gradient is not None
    assert snapshot.gradient.any()
    torch.testing.assert_close(snapshot.gradient.T @ snapshot.x, w.module.weight.grad)  # dW = G^T X
    assert w.end() == [("train", x.numel() // 8)]
    assert w.probe.n_lost_gradients == 0


def test_an_output_that_is_part_of_something_larger_loses_its_gradient_and_says_so():
    class Part(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, torch.cat((self.weight, self.weight)), self.bias.repeat(2))[..., :4]

    w = Watched(module=Part(8, 4))
    nn.functional.relu_(w.module(torch.randn(2, 5, 8))).sum().backward()
    assert w.end() == [("train", 10)]
    assert w.probe.n_lost_gradients == 1
    w.begin()
    w.module(torch.randn(2, 5, 8)).sum().backward()
    assert w.end() == [("train", 10)]
    assert w.probe.n_lost_gradients == 1


def test_tensors_that_cannot_be_read_are_said_to_be():
    class Wrapped(torch.Tensor):
        pass

    w = Watched()
    w.module(torch.ones(3, 8).as_subclass(Wrapped))
    assert w.sent == []
    assert "Wrapped" in w.probe.why_unread


def test_functional_transforms_are_left_alone():
    w = Watched()
    torch.func.vmap(lambda x: w.module(x))(torch.ones(2, 3, 8))
    assert w.sent == []
    assert "functorch" in w.probe.why_unread


def test_a_disarmed_probe_does_nothing():
    w = Watched()
    w.end()
    w.train(2, 5)
    assert w.sent == []


def test_a_compiled_module_is_left_alone():
    w = Watched()
    compiled = torch.compile(nn.Sequential(w.module), backend="eager")
    compiled(torch.ones(3, 8)).sum().backward()
    torch.compiler.reset()
    assert w.sent == []
    assert not w.errors


def test_a_forked_child_hands_nothing_over():
    w = Watched()
    child = os.fork()
    if child == 0:
        w.infer(2, 5)
        w.generate(2, 3, 1)
        os._exit(0 if not w.sent else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert w.probe.armed
