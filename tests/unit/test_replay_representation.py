"""Injected and propagated error, and the point w = Q(w), against products and gradients written out by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxprobe_kernels
from mxprobe.attribution.neighbours import basin_cosines, representations
from mxprobe.measuring.replay.arms import Arm, replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.tables import TABLES
from tests import small_lm

WHEN = {"step": 1, "micro_step": 0, "time_ns": 1}


def q(x: torch.Tensor) -> torch.Tensor:
    return mxprobe_kernels.quantize_dequantize(x.detach().contiguous())[0].double()


def replayed(arm: str, seed: int = 7) -> tuple[nn.Module, torch.Tensor, Arm]:
    model, ids = small_lm.trained(), small_lm.batch(16, seed)
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (at_logits,) = torch.autograd.grad(loss, [logits])
    gradient = PolicyGradient(at_logits, None)
    (found,) = replay_arms(capture(model, (ids,), {}), small_lm.linears(model), (arm,), gradient=gradient)
    return model, ids, found


def outputs(model: nn.Module, ids: torch.Tensor, *, rounds: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Input and output of each Linear, float64 [n, O]; `rounds`: as arm q has them."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def run(module: nn.Linear, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            x = args[0]
            y = F.linear(q(x).float(), q(module.weight).float()) if rounds else output
            seen[name] = (x.detach().flatten(0, 1).double(), y.detach().flatten(0, 1).double())
            return y

        return run

    handles = [module.register_forward_hook(hook(name)) for name, module in small_lm.linears(model).items()]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


def test_injected_and_propagated_error_are_those_of_the_two_forwards():
    model, ids, arm = replayed("q")
    assert arm.representation is not None
    rows = pd.DataFrame([{**WHEN, **row} for row in arm.representation.rows()])
    assert list(rows) == [name for name, _ in TABLES["layers"]]
    exact, rounded = outputs(model, ids, rounds=False), outputs(model, ids, rounds=True)
    found = representations(rows).set_index("module")
    assert list(found.index) == list(exact)  # the order of the calls
    for name, module in small_lm.linears(model).items():
        y, (x_arm, y_arm) = exact[name][1], rounded[name]
        from_arm = x_arm @ module.weight.detach().double().T
        energy = y.square().sum()
        assert found.loc[name, "injected"] == pytest.approx(float((y_arm - from_arm).square().sum() / energy), rel=1e-3)
        error = float((y_arm - y).square().sum() / energy)
        assert 10 ** (-found.loc[name, "snr_db"] / 10) == pytest.approx(error, rel=1e-3)
        propagated = float((from_arm - y).square().sum() / energy)
        assert found.loc[name, "propagated"] == pytest.approx(propagated, rel=1e-3, abs=1e-12)
    assert found["propagated"].iloc[0] < 1e-10  # nothing comes before the first
    assert found["propagated"].iloc[-1] > 0.1 * found["injected"].iloc[-1]


def test_only_the_plain_arm_tells_of_representations():
    assert replayed("qstar")[2].representation is None


def test_the_gradient_at_rounded_weights_is_autograds_there():
    """With the gradient at the policy held, as every arm holds it."""
    model, ids, arm = replayed("q_weights")
    modules = small_lm.linears(model)
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (at_logits,) = torch.autograd.grad(loss, [logits])
    weights = {name: module.weight.detach().clone() for name, module in modules.items()}
    before = logits.detach()
    try:
        for module in modules.values():
            module.weight.data.copy_(q(module.weight).float())
        moved = model(ids)
        gradients = torch.autograd.grad(moved, [module.weight for module in modules.values()], at_logits)
    finally:
        for name, module in modules.items():
            module.weight.data.copy_(weights[name])
    frame = pd.DataFrame([{**WHEN, **row} for row in arm.gradient_rows()])
    cosines = basin_cosines(frame).set_index("module")["basin_cosine"]
    for g, (name, w) in zip(gradients, weights.items(), strict=True):
        step = w.double() - q(w)
        assert cosines[name] == pytest.approx(
            float(F.cosine_similarity(g.double().flatten(), step.flatten(), dim=0)), abs=1e-3
        )
    row = arm.row()
    log_probs = moved.detach().log_softmax(-1), before.log_softmax(-1)
    exact = F.nll_loss(log_probs[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    exact = float(exact - F.nll_loss(log_probs[1][:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    first_order = float((at_logits.double() * (moved.detach() - before).double()).sum())
    assert row["policy_loss_shift"] == pytest.approx(first_order, rel=1e-3, abs=1e-6)
    assert row["policy_loss_shift"] == pytest.approx(exact, abs=2.0 * row["sum_kl"] / row["n_tokens"] + 1e-4)


def test_other_arms_have_no_point():
    rows = list(replayed("q")[2].gradient_rows())
    assert all(row["sum_grad_step"] is row["sum_step2"] is None for row in rows)
    assert basin_cosines(pd.DataFrame([{**WHEN, **row} for row in rows])).empty
