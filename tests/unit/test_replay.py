"""Calls that can and cannot be run again, what is put back, how a policy is read, and counterfactual forwards."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.replay import captured_call, preservation
from mxprobe.measuring.replay.arms import DEFAULT_ARMS, arm_product, quantizer, replay_arms
from mxprobe.measuring.replay.captured_call import capture, forward, replay_target, replayed
from mxprobe.measuring.replay.interception import exact_product, intercepted
from mxprobe.measuring.replay.policy_output import draw_tokens, find_policy, given_tokens
from mxprobe.measuring.replay.preservation import BufferChangedError, RandomState, preserved
from mxprobe.measuring.replay.refusal import NotReplayableError
from tests import small_lm

HELD_OUT = 10**6


class Restless(nn.Module):
    """Its forward draws from every generator and changes buffers and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("rebound", torch.zeros(2))
        self.n_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        self.cached = x
        self.rebound = self.rebound + 1
        self.register_buffer("added", torch.ones(1))
        return self.drop(self.norm(self.linear(x))) * random.random() * float(np.random.rand())


def state(module: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_replay_repeats_the_call_and_leaves_no_mark():
    torch.manual_seed(0)
    module = Restless()
    x = torch.randn(8, 4)
    call = capture(module, (x,), {})
    before, python, numpy, cpu = state(module), random.getstate(), np.random.get_state(), torch.get_rng_state()
    rebound = module.rebound
    outputs: list[torch.Tensor] = []
    for gradient in (True, False):
        with replayed(call, gradient=gradient):
            outputs.append(forward(call))
        assert module.n_calls == 0
        assert module.rebound is rebound
        assert "cached" not in vars(module)
        assert set(state(module)) == set(before)
        assert all(torch.equal(value, before[name]) for name, value in state(module).items())
        assert random.getstate() == python
        assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True))
        assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0], module(x)), "the same dropout, statistics and factors as the call itself"
    assert outputs[0].requires_grad
    assert not outputs[1].requires_grad


def test_all_is_put_back_after_an_error_too():
    module = Restless()
    call = capture(module, (torch.randn(8, 3),), {})
    cpu = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes"), replayed(call, gradient=True):
        forward(call)
    assert module.n_calls == 0
    assert torch.equal(torch.get_rng_state(), cpu)


def test_a_large_buffer_that_changes_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preservation, "MAX_BUFFER_BYTES", 4)
    module = nn.Module()
    module.register_buffer("table", torch.zeros(100))
    with preserved(module, RandomState.now(module)):
        pass
    with pytest.raises(BufferChangedError, match="table"), preserved(module, RandomState.now(module)):
        module.table.add_(1)


def test_arguments_are_copies():
    x, mask = torch.ones(2, 3), torch.ones(2, 3)
    call = capture(nn.Linear(3, 3), (x,), {"masks": {"a": [mask]}, "mode": enum.Enum("Mode", "A").A, "scale": 2.0})
    x.zero_()
    mask.zero_()
    assert call.args[0].sum() == 6
    assert call.kwargs["masks"]["a"][0].sum() == 6
    assert call.kwargs["scale"] == 2.0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (SimpleNamespace(), "cache is a SimpleNamespace, which a second forward could change"),
        ([object()], "cache is a object"),
        (torch.ones(2).as_subclass(type("Wrapped", (torch.Tensor,), {})), "cache is a Wrapped"),
        (torch.zeros(1).expand(1 << 31), "its arguments are larger than 1024 MiB"),
    ],
)
def test_arguments_that_cannot_be_copied_are_refused_by_name(argument: object, message: str):
    with pytest.raises(NotReplayableError, match=message):
        capture(nn.Linear(3, 3), (), {"cache": argument})


def test_what_wraps_a_model_is_left_out_and_what_communicates_refused():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class FullyShardedDataParallel(nn.Module):
        pass

    inner = nn.Linear(2, 2)
    assert replay_target(DistributedDataParallel(inner)) is inner
    assert replay_target(torch.compile(inner, backend="eager")) is inner  # type: ignore[arg-type]
    with pytest.raises(NotReplayableError, match="gathers parameters"):
        replay_target(nn.Sequential(FullyShardedDataParallel()))
    with pytest.raises(NotReplayableError, match="SyncBatchNorm"):
        replay_target(nn.Sequential(nn.SyncBatchNorm(2)))


def test_other_ranks_are_not_kept_waiting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(captured_call, "_world_size", lambda: 4)
    with pytest.raises(NotReplayableError, match="4 ranks"):
        replay_target(nn.Linear(2, 2))


def test_autocast_is_as_it_was():
    module = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = capture(module, (torch.ones(2, 4),), {})
    with replayed(call, gradient=False):
        assert forward(call).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_is_that_of_the_linears_output_whatever_is_done_in_place(in_place: bool):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=in_place), nn.Linear(5, 3))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    call = capture(model, (x,), {})
    linear: Any = model[0]
    with replayed(call, gradient=True), intercepted({"0": linear}, exact_product, record={"0"}) as intercept:
        out = forward(call)
        (g,) = torch.autograd.grad(out.sum(), [intercept.calls[0].edge])
    y = linear(x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[2](torch.relu(y)).sum(), y)
    assert torch.equal(g, expected)
    assert not linear._forward_hooks


def test_policies_are_found_in_what_models_return():
    logits, log_probs = torch.zeros(2, 3, 5), torch.zeros(2, 3)
    for output in (
        logits,
        {"logits": logits},
        OrderedDict(logits=logits, loss=torch.zeros(())),
        SimpleNamespace(logits=logits),
        (logits, [None]),
    ):
        policy = find_policy(output)
        assert policy is not None
        assert policy.tensor is logits
    fused = find_policy(SimpleNamespace(logits=None, log_probs=log_probs, entropy=log_probs, loss=None))
    assert fused is not None
    assert fused.tensor is fused.entropy is log_probs
    for output in (None, log_probs, torch.zeros(2, 3, 1), {"values": logits}, SimpleNamespace(), (log_probs,), "text"):
        assert find_policy(output) is None


def test_given_tokens_are_those_that_follow():
    ids = torch.tensor([[1, 2, 3, 4]])
    assert given_tokens(ids, torch.Size((1, 4, 9)))[0].tolist() == [2, 3, 4, -1]  # type: ignore[index]
    assert given_tokens(ids, torch.Size((1, 2, 9)))[0].tolist() == [4, -1]  # type: ignore[index]
    for unknown in (None, ids.float(), ids[0], torch.ones(2, 4, dtype=torch.long), ids[:, :2]):
        assert given_tokens(unknown, torch.Size((1, 4, 9))) is None


def test_drawn_tokens_follow_the_distribution_and_not_the_global_state():
    p = torch.tensor([0.5, 0.3, 0.2])
    before = torch.get_rng_state()
    tokens = draw_tokens(p.log().expand(20, 1000, 3), torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    shares = torch.bincount(tokens.flatten(), minlength=3) / tokens.numel()
    assert torch.allclose(shares, p, atol=0.015)


def replay(*arms: str, **options: Any) -> dict[str, dict[str, Any]]:
    model = small_lm.trained()
    call = capture(model, (small_lm.batch(24, HELD_OUT),), {})
    return {arm.name: arm.row() for arm in replay_arms(call, small_lm.linears(model), arms, **options)}


def test_arms_against_forwards_written_out_by_hand():
    model, ids = small_lm.trained(), small_lm.batch(24, HELD_OUT)
    rows = replay("high", "q")
    assert rows["high"]["sum_kl"] == rows["high"]["sum_log_prob_shift2"] == 0.0

    def rounded(module: nn.Linear, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            mxprobe_kernels.quantize_dequantize(args[0])[0], mxprobe_kernels.quantize_dequantize(module.weight)[0]
        )

    with torch.no_grad():
        exact = model(ids).log_softmax(-1)
        handles = [module.register_forward_hook(rounded) for module in small_lm.linears(model).values()]
        inexact = model(ids).log_softmax(-1)
        for handle in handles:
            handle.remove()
    counted = slice(None, -1)  # nothing follows the last position
    kl = (exact.exp() * (exact - inexact)).sum(-1)[:, counted]
    shift = (inexact - exact)[:, counted].gather(-1, ids[:, 1:, None])
    row = rows["q"]
    assert row["estimator"] == "exact"
    assert row["n_tokens"] == kl.numel()
    assert row["sum_kl"] == pytest.approx(float(kl.sum()), rel=1e-3)
    assert row["sum_log_prob_shift"] == pytest.approx(float(shift.sum()), rel=1e-2, abs=1e-2)
    assert np.isnan(row["loss_shift"])


def test_the_sequential_split_finds_the_grid():
    rows = replay("q", "qstar", "qstar_dz")
    q, qstar, qstar_dz = (rows[arm]["sum_kl"] / rows[arm]["n_tokens"] for arm in ("q", "qstar", "qstar_dz"))
    assert qstar_dz / q > 0.5 > max((q - qstar) / q, (qstar - qstar_dz) / q)


def test_arms_order_as_their_errors_do():
    kl = {arm: row["sum_kl"] for arm, row in replay(*DEFAULT_ARMS, "of:1.0", "of:0.5", "nvfp4").items()}
    assert kl["high"] < kl["of:1.0"] < kl["of:0.5"] < kl["q"]
    assert kl["mxfp8"] < 0.2 * kl["q"]
    assert kl["nvfp4"] < kl["q"]
    assert all(0.3 * kl["q"] < kl[control] < 3.0 * kl["q"] for control in ("noise", "flip"))


def test_controls_have_the_errors_size_row_by_row():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    e = mxprobe_kernels.error_fields(x).e
    for control in ("noise", "flip"):
        put_in = quantizer(control)(x, 5).double() - x.double()
        assert torch.allclose(put_in.norm(dim=1), e.norm(dim=1), rtol=1e-5)
    assert torch.equal(quantizer("noise")(x, 5), quantizer("noise")(x, 5)), "a frozen control"
    assert not torch.equal(quantizer("noise")(x, 5), quantizer("noise")(x, 6))
    restored = quantizer("qstar_dz")(x, 0)
    on_d = mxprobe_kernels.error_fields(x).on_d
    assert torch.equal(restored[on_d], x[on_d])


def test_only_the_operands_asked_for_are_changed():
    from mxprobe.schema import Role

    module = nn.Linear(32, 8)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = arm_product(quantizer("q"), only={("a", Role.X_FWD)})("a", module, x)
        expected = nn.functional.linear(mxprobe_kernels.quantize_dequantize(x)[0], module.weight, module.bias)
        other = arm_product(quantizer("q"), only={("a", Role.X_FWD)})("b", module, x)
    assert torch.equal(alone, expected)
    assert torch.equal(other, module(x))


def test_an_unknown_arm_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown arm 'qq'.*qstar_dz.*mbs"):
        quantizer("qq")
