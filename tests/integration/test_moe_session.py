"""A real tiny Qwen3-MoE that generates and trains, attached: every role of experts and routers, and planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mxprobe.agent import worker
from mxprobe.measuring.recipes import quantize
from tests.integration.test_mismatch import N_SEQUENCES, Loop, attend
from tests.moe_models import tiny
from tests.standin_controller import controlled

ROLES = {"x_fwd", "w_fwd", "g_dgrad", "w_dgrad", "g_wgrad", "x_wgrad"}


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FLUSH_EVERY_S", 0.01)


class QuantizedInGeneration(nn.Module):
    """Stands for an engine that quantizes a router which the trainer keeps in high precision."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._forward = router.forward

    def forward(self, hidden_states: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return self._forward(hidden_states)
        with Rounding():
            return self._forward(hidden_states)


class Rounding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "linear":
            return func(*(quantize(each, "mxfp4+rceil") for each in args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))


def plant(router: nn.Module) -> None:
    router.__dict__["forward"] = QuantizedInGeneration(router).forward


def attended(tmp_path: Path, model: Any, **options: Any) -> dict[str, list[dict[str, Any]]]:
    loop = Loop(model, fused=False, padded_prompts=False)
    with controlled(tmp_path, whatifs=("of:0.5",), **options) as controller:
        rows = attend(controller, loop, n=8)
    assert not [row for row in rows["events"] if row["kind"] == "error"]
    return rows


def last(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["module"]: row for row in rows}


def test_experts_and_routers_are_covered_and_a_router_quantized_on_one_side_is_named(tmp_path: Path):
    model = tiny()
    quantized = "model.layers.1.mlp.gate"
    plant(model.model.layers[1].mlp.gate)
    rows = attended(tmp_path, model, every=6, weights_every=6)

    modules = last(rows["modules"])
    inside = {name: row for name, row in modules.items() if "mlp" in name}
    assert set(inside) == {f"model.layers.{i}.mlp.{part}" for i in (0, 1) for part in PARTS}
    assert {row["status"] for row in inside.values()} == {"probed"}
    assert all("replays" in row["reason"] for row in inside.values())
    assert not modules["lm_head"]["reason"]
    n_tokens = inside[quantized]["train_rows"]
    expert = inside["model.layers.0.mlp.experts.gate_up_proj"]
    assert expert["train_rows"] == 2 * n_tokens
    assert expert["gemm_flops"] == 2 * 2 * n_tokens * 96 * 64
    roles = {(row["module"], row["role"]) for row in rows["tensors"] if row["phase"] == "train"}
    assert {(name, role) for name in inside for role in ROLES} <= roles
    assert set(inside) <= set(last(rows["updates"]))

    recipes = {(row["module"], row["phase"]): row for row in rows["outputs"]}
    for name in inside:
        expected = "mxfp4+rceil" if name == quantized else "none"
        assert recipes[name, "rollout"]["recipe_x"] == recipes[name, "rollout"]["recipe_w"] == expected
        assert recipes[name, "train"]["recipe_x"] == "none"
        assert recipes[name, "rollout"]["exact"]

    routing = {(row["module"], row["phase"]): row for row in rows["routing"]}
    assert all(row["by_logits"] for row in routing.values())
    ran, kept = routing[quantized, "rollout"], routing["model.layers.0.mlp.gate", "rollout"]
    assert ran["n_observed"] == ran["n_predicted"] > 0  # it does what quantized operands do
    assert ran["sum_ran_error2"] == pytest.approx(ran["sum_error2"], rel=1e-3)
    assert kept["n_observed"] == 0 < kept["n_predicted"]
    flips = last(rows["routing_flips"])
    assert flips["model.layers.0.mlp.gate"]["n_flipped"] == 0
    assert 0 < flips[quantized]["n_flipped"] <= flips[quantized]["n_slots"] < flips[quantized]["n_tokens"]
    assert flips[quantized]["n_tokens"] > N_SEQUENCES

    last_step = rows["rollouts"][-1]["step"]
    strata = {row["stratum"]: row for row in rows["rollouts"] if row["step"] == last_step}
    same, flipped, all_tokens = (strata[name] for name in ("routing_same", "routing_flipped", "all"))
    assert same["n_tokens"] + flipped["n_tokens"] == all_tokens["n_tokens"]
    assert flipped["sum_d2"] + same["sum_d2"] == pytest.approx(all_tokens["sum_d2"])
    assert flipped["sum_d2"] > 0.9 * all_tokens["sum_d2"]  # nothing else differs, but earlier flips through attention


PARTS = ("gate", "experts.gate_up_proj", "experts.down_proj")


def test_an_undisturbed_run_has_no_flips(tmp_path: Path):
    rows = attended(tmp_path, tiny(implementation="grouped_mm"), every=4, weights_every=100)
    flips = rows["routing_flips"]
    assert sum(row["n_tokens"] for row in flips) > 100
    assert sum(row["n_flipped"] for row in flips) <= 2  # a tie within the rounding of float32
    assert {row["stratum"] for row in rows["rollouts"]} >= {"all", "routing_same"}
    assert not [row for row in rows["events"] if row["kind"] == "experts"]
