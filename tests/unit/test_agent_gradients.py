"""Gradients as large trainers make them: fused into main_grad, of interleaved micro batches, of recomputed regions."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.agent.roots import trained_roots
from mxprobe.measuring.adapters.main_parameters import gradient_of, is_stepped_by
from mxprobe.measuring.operands.snapshot import Snapshot

K, OUT = 32, 16


def watch(module: nn.Module) -> tuple[ModuleProbe, list[Snapshot], Clock]:
    def fail(where: str, detail: str) -> None:
        raise AssertionError(f"{where}: {detail}")

    clock, sent = Clock(), []
    clock.probed = clock.with_weights = True
    guard = Guard(10, fail, lambda: None)
    probe = ModuleProbe(
        "m", module, clock=clock, guard=guard, submit=sent.append, max_rows=512, max_features=4096, trains=True
    )
    probe.arm()
    return probe, sent, clock


class _FusedLinear(torch.autograd.Function):
    """megatron-core 0.16.1's gradient accumulation fusion: dW goes to `main_grad`, a dummy to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += grads[0].T @ x
        return grads[0] @ ctx.weight, torch.zeros_like(ctx.weight)


class Fused(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _FusedLinear.apply(input, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def test_a_weight_gradient_fused_into_main_grad_is_the_product_of_what_was_captured():
    module = Fused(K, OUT, bias=False)
    module.weight.main_grad = torch.zeros(OUT, K)  # type: ignore[attr-defined]
    _, sent, _ = watch(module)
    module(torch.randn(64, K)).square().sum().backward()
    (snapshot,) = sent
    assert snapshot.gradient is not None
    main_grad = gradient_of(module.weight)
    assert main_grad is not None
    torch.testing.assert_close(snapshot.gradient.T @ snapshot.x, main_grad)
    assert module.weight.grad is not None
    assert not module.weight.grad.any()  # the dummy, of which nothing is to be read


def test_the_optimizer_of_a_master_copy_is_the_model_s():
    model = nn.Sequential(nn.Linear(K, OUT))
    masters = []
    for parameter in model.parameters():
        parameter.main_param = parameter.detach().float().clone().requires_grad_()  # type: ignore[attr-defined]
        masters.append(parameter.main_param)  # type: ignore[attr-defined]
    assert trained_roots([model, nn.Linear(2, 2)], torch.optim.Adam(masters)) == ([model], True)
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    owned = {id(p) for group in other.param_groups for p in group["params"]}
    assert not any(is_stepped_by(parameter, owned) for parameter in model.parameters())


def test_interleaved_micro_batches_are_paired_by_their_own_graph():
    module = nn.Linear(K, OUT)
    _, sent, _ = watch(module)
    inputs = [torch.randn(32, K) for _ in range(3)]
    outputs = [module(x) for x in inputs]
    factors = [2.0, 3.0, 5.0]
    for i in (2, 1, 0):  # the last forward first, as no order of a schedule would be relied on
        (outputs[i] * factors[i]).sum().backward()
    (snapshot,) = sent
    assert torch.equal(snapshot.x, inputs[0])
    assert snapshot.gradient is not None
    assert torch.equal(snapshot.gradient, torch.full((32, OUT), factors[0]))


def test_one_forward_one_backward_measures_the_first_micro_batch_and_counts_all():
    module = nn.Linear(K, OUT)
    probe, sent, _ = watch(module)
    waiting: list[torch.Tensor] = []
    for i in range(4):
        waiting.append(module(torch.full((32, K), float(i))))
        if len(waiting) == 2:
            waiting.pop(0).sum().backward()
    waiting.pop().sum().backward()
    probe.finish_step()
    assert [float(snapshot.x.max()) for snapshot in sent] == [0.0]
    assert probe.train_rows == 4 * 32


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_of_a_checkpointed_region_is_kept_alive_until_its_gradient_comes(reentrant: bool):
    first, watched = nn.Linear(K, 4096), nn.Linear(4096, OUT)
    probe, sent, _ = watch(watched)
    probe._max_rows = 32  # pyright: ignore[reportPrivateUsage]
    seen: list[weakref.ref[torch.Tensor]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        hidden = first(x)
        seen.append(weakref.ref(hidden))
        return watched(hidden)

    x = torch.randn(1024, K, requires_grad=True)
    y = checkpoint(region, x, use_reentrant=reentrant)
    gc.collect()
    assert seen[0]() is None
    held = probe._train  # pyright: ignore[reportPrivateUsage]
    if held is not None:
        assert len(held.x) <= 128
        assert held.x.untyped_storage().nbytes() == held.x.numel() * 4  # the sampled rows, and no view of the 1024
    y.sum().backward()
    (snapshot,) = [each for each in sent if each.gradient is not None]
    assert snapshot.gradient is not None
    assert torch.equal(snapshot.gradient, torch.ones(len(snapshot.x), OUT))
