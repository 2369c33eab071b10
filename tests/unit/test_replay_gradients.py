"""Arms run backwards: the weight gradients they make, against autograd and against products written out by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxprobe_kernels
from mxprobe.attribution.replay_effects import (
    arm_effects,
    gradient_effects,
    gradient_errors,
    gradient_split,
    gradient_structure,
    kl_split,
    kl_structure,
)
from mxprobe.measuring.operands.gradient_error import WGRAD, gradient_error
from mxprobe.measuring.replay.arms import DEFAULT_ARMS, Arm, replay_arms
from mxprobe.measuring.replay.backward import WeightGradients
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.schema import Role
from tests import small_lm

HELD_OUT = 10**6


def loss_gradient(model: nn.Module, ids: torch.Tensor) -> tuple[PolicyGradient, dict[str, torch.Tensor]]:
    """Gradient of the cross-entropy at the logits, and autograd's own at the weights of the Linears."""
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    weights = {name: module.weight for name, module in small_lm.linears(model).items()}
    at_logits, *at_weights = torch.autograd.grad(loss, [logits, *weights.values()])
    return PolicyGradient(at_logits, None), dict(zip(weights, at_weights, strict=True))


def replay(arms: tuple[str, ...], *, seed: int = 0, n: int = 16, **options: Any) -> dict[str, Arm]:
    model, ids = small_lm.trained(), small_lm.batch(n, HELD_OUT + seed)
    gradient, _ = loss_gradient(model, ids)
    call = capture(model, (ids,), {})
    found = replay_arms(call, small_lm.linears(model), arms, gradient=gradient, seed=seed, **options)
    return {arm.name: arm for arm in found}


def frames(n_microbatches: int = 2) -> tuple[pd.DataFrame, pd.DataFrame]:
    forward: list[dict[str, Any]] = []
    backward: list[dict[str, Any]] = []
    for i in range(n_microbatches):
        when = {"step": i, "micro_step": 0, "rank": 0}
        for arm in replay(DEFAULT_ARMS, seed=i).values():
            forward.append({**when, **arm.row()})
            backward += [{**when, **row} for row in arm.gradient_rows()]
    return pd.DataFrame(forward), pd.DataFrame(backward)


def test_high_precision_gives_the_gradients_of_autograd():
    model, ids = small_lm.trained(), small_lm.batch(16, HELD_OUT)
    gradient, expected = loss_gradient(model, ids)
    before = [p.grad for p in model.parameters()]
    call = capture(model, (ids,), {})
    (arm,) = replay_arms(call, small_lm.linears(model), ("keep_high_precision",), gradient=gradient)
    rows = {row["module"]: row for row in arm.gradient_rows()}
    assert rows.keys() == expected.keys()
    for name, g in expected.items():
        assert rows[name]["ref2"] == pytest.approx(float(g.double().square().sum()), rel=1e-4)
        assert rows[name]["err2"] <= 1e-8 * rows[name]["ref2"]
    assert [p.grad for p in model.parameters()] == before == [None] * len(before)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def test_each_gemm_rounds_its_operands_along_its_own_axis():
    model = Two()
    generator = torch.Generator().manual_seed(6)
    x, g = torch.randn(2, 32, 64, generator=generator), torch.randn(2, 32, 32, generator=generator)

    def q(t: torch.Tensor) -> torch.Tensor:
        return mxprobe_kernels.quantize_dequantize(t.detach().contiguous())[0].double()

    rows, wa, wb, g2 = x.reshape(-1, 64), model.a.weight, model.b.weight, g.reshape(-1, 32)
    hidden = torch.relu(q(rows) @ q(wa).T + model.a.bias.detach().double())
    back = (q(g2) @ q(wb.T).T) * (hidden > 0)
    expected = {"b": q(g2.T) @ q(hidden.float().T).T, "a": q(back.float().T) @ q(rows.T).T}
    exact_hidden = torch.relu(rows @ wa.T + model.a.bias).detach().double()
    exact_back = (g2.double() @ wb.detach().double()) * (exact_hidden > 0)
    exact = {"b": g2.double().T @ exact_hidden, "a": exact_back.T @ rows.double()}

    (arm,) = replay_arms(
        capture(model, (x,), {}), {"a": model.a, "b": model.b}, ("q",), gradient=PolicyGradient(g, None)
    )
    for row in arm.gradient_rows():
        d = expected[row["module"]] - exact[row["module"]]
        assert row["err2"] == pytest.approx(float(d.square().sum()), rel=1e-4)
        assert row["ref_err"] == pytest.approx(float((d * exact[row["module"]]).sum()), rel=1e-3)
        assert row["sampled_frac"] == 1.0


def test_wgrad_operands_alone_give_the_exact_local_error():
    """What `gradients` says of captured X and G is what a rerun with these operands rounded makes of dW."""
    model, ids = small_lm.trained(), small_lm.batch(16, HELD_OUT)
    gradient, _ = loss_gradient(model, ids)
    captured: dict[str, torch.Tensor] = {}
    linear = small_lm.linears(model)["layers.1.up"]

    def hook(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        captured["x"] = args[0].detach().flatten(0, 1)
        output.register_hook(lambda g: captured.__setitem__("g", g.flatten(0, 1)))

    handle = linear.register_forward_hook(hook)
    logits = model(ids)
    handle.remove()
    torch.autograd.grad(logits, [linear.weight], gradient.tensor)
    fields = [mxprobe_kernels.error_fields(captured[name].T.contiguous()) for name in ("g", "x")]
    local = next(iter(gradient_error(WGRAD, *fields)))
    only = {("layers.1.up", Role.G_WGRAD), ("layers.1.up", Role.X_WGRAD)}
    rows = {row["module"]: row for row in replay(("q",), only=only)["q"].gradient_rows()}
    seen = rows["layers.1.up"]
    assert seen["err2"] / seen["ref2"] == pytest.approx(local["err2"] / local["ref2"], rel=1e-3)
    assert all(row["err2"] <= 1e-8 * row["ref2"] for name, row in rows.items() if name != "layers.1.up")


def test_split_controls_and_intervals_for_kl_and_for_gradients():
    forward, backward = frames()
    arms = arm_effects(forward)
    gain = arms["mxfp8"].gain
    assert gain is not None
    assert gain.value > 0.8
    assert gain.low < gain.value < gain.high
    assert arms["q"].gain is None
    assert {effect.kl.n for effect in arms.values()} == {2}
    for split in (kl_split(forward), gradient_split(backward)):
        assert sum(part.value for part in split.values()) == pytest.approx(1.0, abs=1e-12)
        assert split["grid"].value > 0.5
        assert split["grid"].low < split["grid"].value < split["grid"].high
    for ratios in (kl_structure(forward), gradient_structure(backward)):
        assert set(ratios) == {"noise", "flip"}
        assert all(0.3 < ratio.value < 3.0 for ratio in ratios.values())
    errors = {arm: error.value for arm, error in gradient_errors(backward).items()}
    assert errors["high"] < 1e-8 < errors["mxfp8"] < 0.2 * errors["q"]
    effects = gradient_effects(backward).set_index(["arm", "module"])
    q = effects.loc["q"]
    assert q["cosine"].between(0.5, 1.0).all()
    assert len(q) == 28


def test_without_the_arms_of_a_sequence_there_is_no_split():
    forward = pd.DataFrame([{"step": 0, "micro_step": 0, "arm": "q", "sum_kl": 1.0, "n_tokens": 10.0}])
    assert kl_split(forward) == kl_structure(forward) == {}


def test_of_large_models_some_output_features_are_kept():
    linear = nn.Linear(64, 100)
    gradients = WeightGradients({"a": linear}, max_elements=64 * 10)
    index = gradients.features(100, torch.device("cpu"))
    assert index is not None
    assert index.tolist() == list(range(0, 100, 10))
    assert WeightGradients({"a": linear}).features(100, torch.device("cpu")) is None


def test_frozen_weights_have_no_gradient_and_those_below_a_cut_are_not_reached():
    model, ids = Two(), torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
    model.a.weight.requires_grad_(False)
    gradient = PolicyGradient(torch.ones(2, 8, 32), None)
    modules = {"a": model.a, "b": model.b}
    (arm,) = replay_arms(capture(model, (ids,), {}), modules, ("q",), gradient=gradient)
    assert [row["module"] for row in arm.gradient_rows()] == ["b"]

    class Cut(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                hidden = torch.relu(self.a(x))
            return self.b(hidden)

    cut = Cut()
    (arm,) = replay_arms(capture(cut, (ids,), {}), {"a": cut.a, "b": cut.b}, ("q",), gradient=gradient)
    assert [row["module"] for row in arm.gradient_rows()] == ["b"]
