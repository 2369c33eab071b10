"""Gradient probes against the truth: the microbatch run again with one operand's error put in, all dW compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.replay.arms import HIGH, arm_product, quantizer, run_arm
from mxprobe.measuring.replay.backward import WeightGradients
from mxprobe.measuring.replay.captured_call import Call, capture
from mxprobe.measuring.replay.gradient_probes import COMPONENTS, INTERVENTION, ROLES, groups, probe_gradients
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.tables import TABLES
from tests import small_lm
from tests.unit.test_replay_gradients import HELD_OUT, loss_gradient
from tests.unit.test_sensitivity import spearman


def small_call(n: int = 16) -> tuple[Call, dict[str, nn.Linear], PolicyGradient]:
    model, ids = small_lm.trained(), small_lm.batch(n, HELD_OUT)
    gradient, _ = loss_gradient(model, ids)
    return capture(model, (ids,), {}), small_lm.linears(model), gradient


def truth(
    call: Call, modules: dict[str, nn.Linear], gradient: PolicyGradient, names: list[str]
) -> dict[tuple[str, str], float]:
    """||change of all dW||^2 with one operand of one module rounded."""
    high = WeightGradients(modules)
    run_arm(call, modules, arm_product(quantizer(HIGH), gradients=high), gradient, high)
    found: dict[tuple[str, str], float] = {}
    for name in names:
        for role in ROLES:
            with_error = WeightGradients(modules)
            product = arm_product(quantizer("q"), only={(name, role)}, gradients=with_error)
            run_arm(call, modules, product, gradient, with_error)
            sums = torch.stack([each.values for each in with_error.against(high, modules)]).sum(0)
            found[name, role.value] = float(sums[1])
    return found


def predicted(rows: list[dict[str, Any]], component: str = "total") -> dict[tuple[str, str], float]:
    return {(row["module"], row["role"]): row["err2"] for row in rows if row["component"] == component}


def test_sixteen_probes_order_all_operands_by_what_they_do_to_the_gradient():
    call, modules, gradient = small_call()
    rows = probe_gradients(call, modules, gradient, n_probes=16)
    when = ("step", "micro_step", "time_ns", "format", "rule")
    assert {*rows[0], *when} == {name for name, _ in TABLES["gradient_probes"]}
    assert {row["component"] for row in rows} == set(COMPONENTS)
    assert len(rows) == len(modules) * len(ROLES) * len(COMPONENTS)
    some = [name for name in modules if name.startswith(("layers.0", "layers.3"))]
    true = truth(call, modules, gradient, some)
    size = rows[0]["ref2"]
    known = [key for key, value in true.items() if value > 1e-9 * size]  # the lowest layer's dX goes nowhere
    assert len(known) >= 78
    seen = predicted(rows)
    assert spearman([seen[key] for key in known], [true[key] for key in known]) >= 0.95
    assert 0.8 < np.median([seen[key] / true[key] for key in known]) < 1.2
    assert all(p.grad is None for p in call.module.parameters())


class Product(nn.Module):
    """Two Linears and nothing between them, so that the effect of an error on dW can be written down."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.a, self.b = nn.Linear(64, 32, bias=False), nn.Linear(32, 32)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_each_effect_against_its_product_written_out():
    model = Product()
    generator = torch.Generator().manual_seed(3)
    x, g = torch.randn(2, 32, 64, generator=generator), torch.randn(2, 32, 32, generator=generator)
    call = capture(model, (x,), {})
    rows = probe_gradients(call, {"a": model.a, "b": model.b}, PolicyGradient(g, None), n_probes=600)
    e = mxprobe_kernels.error_fields
    x2, g2 = x.reshape(-1, 64), g.reshape(-1, 32)
    wa, wb = model.a.weight.detach(), model.b.weight.detach()
    hidden = x2 @ wa.T
    expected = {
        ("a", "x_fwd"): g2.T.double() @ (e(x2).e @ wa.T.double()),  # moves b's input
        ("a", "w_fwd"): g2.T.double() @ (x2.double() @ e(wa).e.T),
        ("b", "g_dgrad"): (e(g2).e @ wb.double()).T @ x2.double(),  # moves a's output gradient
        ("b", "w_dgrad"): (g2.double() @ e(wb.T.contiguous()).e.T).T @ x2.double(),
        ("b", "g_wgrad"): e(g2.T.contiguous()).e @ hidden.double(),
        ("b", "x_wgrad"): g2.T.double() @ e(hidden.T.contiguous()).e.T,
    }
    seen = predicted(rows)
    for key, product in expected.items():
        exact = key[1].endswith("wgrad")
        assert seen[key] == pytest.approx(float(product.square().sum()), rel=1e-3 if exact else 0.15), key
    grid = predicted(rows, "grid")["b", "g_wgrad"]
    part = e(g2.T.contiguous()).e_grid @ hidden.double()
    assert grid == pytest.approx(float(part.square().sum()), rel=1e-3)
    for nowhere in (("a", "g_dgrad"), ("a", "w_dgrad"), ("b", "x_fwd"), ("b", "w_fwd")):
        assert seen[nowhere] == 0.0


class Once(torch.autograd.Function):
    """A kernel with a first derivative and no second, like those of fused attention."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * outputs[0]


def test_where_there_is_no_second_derivative_groups_are_intervened_on():
    class Fused(Product):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(Once.apply(self.a(x)))

    model = Fused()
    generator = torch.Generator().manual_seed(3)
    x, g = torch.randn(2, 32, 64, generator=generator), torch.randn(2, 32, 32, generator=generator)
    call, modules = capture(model, (x,), {}), {"a": model.a, "b": model.b}
    rows = probe_gradients(call, modules, PolicyGradient(g, None))
    assert {(row["method"], row["n_probes"], row["component"]) for row in rows} == {(INTERVENTION, 0, "total")}
    true = truth(call, modules, PolicyGradient(g, None), ["a", "b"])
    for row in rows:
        assert row["err2"] == pytest.approx(true[row["module"].lstrip("*"), row["role"]], rel=1e-6, abs=1e-6)


def test_groups_are_kinds_of_modules_or_roles_where_there_are_too_many():
    names = [f"layers.{i}.{kind}" for i in range(3) for kind in ("up", "down")]
    found = list(groups({name: nn.Linear(1, 1) for name in names}))
    assert len(found) == 12
    assert found[0] == ("*up", ROLES[0], [name for name in names if name.endswith("up")])
    many = list(groups({f"expert{i}": nn.Linear(1, 1) for i in range(20)}))
    assert [pattern for pattern, _, _ in many] == ["*"] * 6


def test_no_gradient_is_said():
    model = Product()
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(NotReplayableError, match="no gradient of the policy"):
        probe_gradients(capture(model, (x,), {}), {"a": model.a}, PolicyGradient(torch.ones(2, 4, 32), None))
