"""TransformerEngine's grouped GEMM: operands and gradients of each expert, by a stand-in with the pinned signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.module_rows import module_rows
from mxprobe.agent.probes.grouped_probe import GroupedProbe
from mxprobe.agent.probes.router_probe import probe_of
from mxprobe.measuring.adapters.expert_numbers import first_experts
from mxprobe.measuring.adapters.weight_modules import take_inventory
from mxprobe.measuring.moe import expert_snapshot as snapshot
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe_kernels import reference
from tests.standin_modules import GroupedLinear
from tests.unit.test_moe_experts import ROLES, operands

K, OUT = 64, 96
SPLITS = [40, 0, 1, 29]


class Watched:
    """A probed step of one module."""

    def __init__(self, module: nn.Module, *, first: int = 0) -> None:
        self.sent: list[Any] = []
        self.errors: list[str] = []
        clock = Clock()
        clock.probed = clock.with_weights = True
        make = probe_of(module, every_expert=True, first_expert=first)
        self.probe = make(
            "layers.0.mlp.experts.linear_fc1",
            module,
            clock=clock,
            guard=Guard(10, lambda where, detail: self.errors.append(f"{where}: {detail}"), lambda: None),
            submit=self.sent.append,
            max_rows=512,
            max_features=512,
            trains=True,
        )
        self.probe.arm()

    def end(self) -> ExpertsSnapshot:
        self.probe.finish_step()
        assert not self.errors
        (found,) = self.sent
        return found  # type: ignore[no-any-return]


def rows(each: ExpertsSnapshot) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for table, row in measure_step([each], AgentConfig(experts=-1), recipes={}, history=WeightHistory()):
        found.setdefault(table, []).append(row)
    return found


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("bias", ["none", "added", "returned"])
def test_each_expert_s_operands_and_gradients_are_its_own_rows(
    as_tensor: bool, bias: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(snapshot, "CPU_ROWS", 512)
    monkeypatch.setattr(snapshot, "CPU_FEATURES", 512)
    module = GroupedLinear(4, K, OUT, bias=bias != "none", return_bias=bias == "returned")
    x = torch.randn(sum(SPLITS), K) * torch.logspace(0, 1, K)
    watched = Watched(module, first=8)
    assert isinstance(watched.probe, GroupedProbe)
    output = module(x, torch.tensor(SPLITS) if as_tensor else SPLITS)
    y = output[0] if isinstance(output, tuple) else output
    y.retain_grad()
    y.square().sum().backward()
    assert y.grad is not None
    found = rows(watched.end())
    single = {(row["role"], row["expert"]): row for row in found["experts"]}
    assert {expert for _, expert in single} == {8, 10, 11}  # 9 was sent no token
    assert single["x_fwd", 10]["rows"] == 1
    tensors = {row["role"]: row for row in found["tensors"]}
    totals = dict.fromkeys(ROLES, 0.0)
    begin = 0
    for e, n in enumerate(SPLITS):
        part = slice(begin, begin + n)
        begin += n
        w = module.get_parameter(f"weight{e}").detach()
        for role, (a, b) in zip(ROLES, operands(x[part], w, y.grad[part]), strict=True):
            if not n:
                continue
            d = reference.decompose(a.numpy())
            wanted = {**{key: d.values[key] for key in ("n", "n_zeroed", "sum_x2", "sum_e2", "sum_scale2")}}
            wanted["out_e2"] = float(((torch.from_numpy(d.q) - a.double()) @ b.double()).square().sum())
            for key, value in wanted.items():
                assert single[role, 8 + e][key] == pytest.approx(value, rel=1e-6), (role, e, key)
            totals[role] += d.values["sum_e2"]
    for role, total in totals.items():
        assert tensors[role]["sum_e2"] == pytest.approx(total, rel=1e-6)
        assert tensors[role]["sampled_frac"] == 1.0
    (outputs,) = found["outputs"]
    assert outputs["exact"]
    assert {row["gemm"] for row in found["gradients"]} == {"wgrad", "dgrad"}


def test_rows_that_fill_up_an_expert_s_tile_are_not_counted():
    module = GroupedLinear(2, K, OUT)
    x = torch.randn(64, K)
    x[20:32] = 0  # FP8 pads each expert's rows
    watched = Watched(module)
    module(x, m_splits=[32, 32]).square().sum().backward()
    tensors = {row["role"]: row for row in rows(watched.end())["tensors"]}
    assert tensors["x_fwd"]["n"] == (20 + 32) * K


def test_its_share_of_the_work_is_that_of_the_rows_it_was_given():
    module = nn.Sequential(GroupedLinear(4, K, OUT))
    entries = take_inventory([module], ["*"])
    watched = Watched(module[0])
    module[0](torch.randn(70, K), SPLITS).sum().backward()
    watched.end()
    (row,) = module_rows(entries, {entries[0].name: watched.probe})
    assert (row["status"], row["train_rows"]) == ("probed", 70)
    assert row["gemm_flops"] == 2.0 * 70 * K * OUT


class _Quantized(torch.Tensor):
    """A parameter held in FP8, as `fp8_model_init` makes it: no plain tensor."""


def test_experts_held_in_fp8_without_a_master_are_not_measured_and_say_why():
    module = GroupedLinear(2, K, OUT)
    plain = module.weight1.detach()
    module.weight1 = nn.Parameter(plain.as_subclass(_Quantized))
    watched = Watched(module)
    module.forward = lambda inp, m_splits: inp @ plain.T  # type: ignore[method-assign]
    module(torch.randn(32, K), [16, 16])
    watched.probe.finish_step()
    assert "no whole master" in watched.probe.why_unread
    assert not watched.sent
    assert not watched.errors


def test_experts_spread_over_tensor_parallel_ranks_are_not_measured():
    module = GroupedLinear(2, K, OUT)
    module.tp_size = 2
    watched = Watched(module)
    module(torch.randn(32, K), [16, 16]).sum().backward()
    assert "tensor-parallel" in watched.probe.why_unread


def test_experts_below_a_layer_that_knows_its_indices_begin_there():
    layer = nn.Module()
    layer.local_expert_indices = [4, 5, 6, 7]
    layer.experts = nn.Sequential(GroupedLinear(4, K, OUT))
    model = nn.Sequential(GroupedLinear(4, K, OUT), layer)
    assert first_experts([model]).get(id(layer.experts[0])) == 4
    assert id(model[0]) not in first_experts([model])
