"""Every family's operands against its documented arithmetic; a class that has changed is told, not guessed at."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.module_rows import module_rows
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.measuring.adapters.adapter import MISFIT, held
from mxprobe.measuring.adapters.families import ADAPTERS, adapter_of
from mxprobe.measuring.adapters.weight_modules import misfits, take_inventory
from mxprobe.measuring.operands.snapshot import Snapshot
from tests import standin_modules as upstream

K, OUT, ROWS = 64, 32, 96


def probe(module: nn.Module, part: str, sent: list[Snapshot]) -> ModuleProbe:
    def fail(where: str, detail: str) -> None:
        raise AssertionError(f"{where}: {detail}")

    clock = Clock()
    clock.probed = clock.with_weights = True
    guard = Guard(10, fail, lambda: None)
    return ModuleProbe(
        "m",
        module,
        clock=clock,
        guard=guard,
        submit=sent.append,
        max_rows=512,
        max_features=4096,
        trains=True,
        part=part,
    )


def train(module: nn.Module, *, part: str = "", **kwargs: Any) -> tuple[Snapshot, torch.Tensor, torch.Tensor]:
    """(what was captured, x, gradient of the module's output) of one training call."""
    sent: list[Snapshot] = []
    watched = probe(module, part, sent)
    x = torch.randn(8, ROWS // 8, K, requires_grad=True)
    watched.arm()
    output = module(x, **kwargs)
    y = output[0] if isinstance(output, tuple) else output
    y.retain_grad()
    y.square().sum().backward()
    watched.finish_step()
    (snapshot,) = sent
    assert y.grad is not None
    return snapshot, x.detach().reshape(-1, K), y.grad.reshape(-1, y.shape[-1])


PLAIN: dict[str, tuple[Any, bool]] = {
    "Linear": (lambda: nn.Linear(K, OUT), True),
    "te.Linear": (lambda: upstream.Linear(K, OUT), True),
    "te.Linear, bias returned": (lambda: upstream.Linear(K, OUT, return_bias=True), False),
    "ColumnParallelLinear": (lambda: upstream.ColumnParallelLinear(K, OUT), True),
    "ColumnParallelLinear, bias returned": (lambda: upstream.ColumnParallelLinear(K, OUT, skip_bias_add=True), False),
    "RowParallelLinear": (lambda: upstream.RowParallelLinear(K, OUT), True),
}


@pytest.mark.parametrize(("make", "with_bias"), PLAIN.values(), ids=list(PLAIN))
def test_operands_are_x_w_and_g_whatever_else_the_module_returns(make: Any, with_bias: bool):
    module = make()
    snapshot, x, g = train(module)
    assert torch.equal(snapshot.x, x)
    assert torch.equal(snapshot.weight.rows, module.weight)
    assert snapshot.gradient is not None
    assert torch.equal(snapshot.gradient, g)
    y = F.linear(x, module.weight, module.bias if with_bias else None)
    assert snapshot.y is not None
    torch.testing.assert_close(snapshot.y, y.detach())
    assert (snapshot.weight.bias is not None) == with_bias


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True])
def test_layer_norm_linear_multiplies_by_norm_of_x(normalization: str, centred: bool):
    module = upstream.LayerNormLinear(
        K, OUT, 1e-3, normalization=normalization, zero_centered_gamma=centred, return_layernorm_output=True
    )
    snapshot, x, g = train(module)
    torch.testing.assert_close(snapshot.x, module.norm(x).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(snapshot.weight.rows, torch.cat([module.query_weight, module.kv_weight]))
    assert snapshot.gradient is not None
    assert torch.equal(snapshot.gradient, g)
    assert snapshot.y is not None
    torch.testing.assert_close(snapshot.y, snapshot.x @ snapshot.weight.rows.T, rtol=1e-4, atol=1e-4)


def test_layer_norm_mlp_shows_its_first_gemm_and_says_what_it_hides():
    module = upstream.LayerNormMLP(K, 128)
    snapshot, x, _ = train(module, part="fc1")
    torch.testing.assert_close(snapshot.x, module.norm(x).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(snapshot.weight.rows, module.fc1_weight)
    assert (snapshot.y, snapshot.gradient) == (None, None)
    rows = {row["module"]: row for row in module_rows(take_inventory([nn.Sequential(module)], ["*"]), {})}
    assert set(rows) == {"0.fc1", "0.fc2"}
    assert "inside the fused LayerNormMLP" in rows["0.fc2"]["reason"]
    assert rows["0.fc2"]["status"] == "not_called"


def test_a_weight_given_to_the_call_is_the_weight():
    module = upstream.ColumnParallelLinear(K, OUT, bias=False)
    tied = nn.Parameter(torch.randn(OUT, K))
    snapshot, _, _ = train(module, weight=tied)
    assert torch.equal(snapshot.weight.rows, tied)


def test_fake_quantized_linears_show_their_operands_unrounded():
    for module in (upstream.QATLinear(K, OUT), upstream.QuantLinear(K, OUT)):
        snapshot, x, _ = train(module)
        assert torch.equal(snapshot.x, x)
        assert torch.equal(snapshot.weight.rows, module.weight)


def test_modelopt_scales_x_before_it_rounds_it():
    module = upstream.QuantLinear(K, OUT)
    scale = torch.rand(K) + 0.5
    module.input_quantizer.register_buffer("_pre_quant_scale", scale)
    snapshot, x, _ = train(module)
    torch.testing.assert_close(snapshot.x, x * scale)


@pytest.mark.parametrize("rotate", [True, {"enable": True}, False, {"enable": False}])
def test_modelopt_that_rotates_x_is_not_measured(rotate: Any):
    module = upstream.QuantLinear(K, OUT)
    module.input_quantizer._rotate = rotate
    sent: list[Snapshot] = []
    watched = probe(module, "", sent)
    watched.arm()
    module(torch.randn(8, K)).sum().backward()
    watched.finish_step()
    rotates = rotate is True or (isinstance(rotate, dict) and rotate["enable"])
    assert watched.why_unread == ("its input quantizer rotates x before it rounds it" if rotates else "")
    assert len(sent) == (not rotates)


class _Quantized(torch.Tensor):
    """A parameter held in FP8, as `fp8_model_init` makes it: no plain tensor."""


def test_a_weight_held_in_fp8_is_measured_by_the_optimizers_master_or_not_at_all():
    module = upstream.Linear(K, OUT, bias=False)
    master = torch.randn(OUT, K)
    held_in_fp8 = nn.Parameter(module.weight.detach().as_subclass(_Quantized))
    module.weight = held_in_fp8
    sent: list[Snapshot] = []
    watched = probe(module, "", sent)
    watched.arm()
    F_linear = lambda inp: F.linear(inp, module.weight.as_subclass(torch.Tensor))  # noqa: E731
    module.forward = F_linear  # type: ignore[method-assign, assignment]
    module(torch.randn(4, K))
    assert "not a plain" in watched.why_unread
    held_in_fp8.main_param = master.reshape(-1)  # type: ignore[attr-defined]
    snapshot, _, _ = train(module)
    assert torch.equal(snapshot.weight.rows, master)


def test_every_family_is_recognised_by_package_and_class():
    modules: list[nn.Module] = [
        upstream.Linear(K, OUT),
        upstream.LayerNormLinear(K, OUT),
        upstream.LayerNormMLP(K, OUT),
        upstream.GroupedLinear(2, K, OUT),
        upstream.ColumnParallelLinear(K, OUT),
        upstream.RowParallelLinear(K, OUT),
        upstream.QATLinear(K, OUT),
        upstream.QuantLinear(K, OUT),
        nn.Linear(K, OUT),
    ]
    found = [adapter_of(module) for module in modules]
    assert len({adapter.family for adapter in found if adapter is not None}) == len(modules)
    assert all(adapter is not None and not adapter.misfit(m) for adapter, m in zip(found, modules, strict=True))


def renamed(base: type[nn.Module], package_module: str) -> type[nn.Module]:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(OUT, K))

        def forward(self, hidden_states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return hidden_states

    Changed.__name__, Changed.__module__ = base.__name__, package_module
    return Changed


CHANGED = [
    renamed(upstream.Linear, "transformer_engine.pytorch.module.linear"),
    renamed(upstream.LayerNormLinear, "transformer_engine.pytorch.module.layernorm_linear"),
    renamed(upstream.LayerNormMLP, "transformer_engine.pytorch.module.layernorm_mlp"),
    renamed(upstream.GroupedLinear, "transformer_engine.pytorch.module.grouped_linear"),
    renamed(upstream.ColumnParallelLinear, "megatron.core.tensor_parallel.layers"),
    renamed(upstream.RowParallelLinear, "megatron.core.tensor_parallel.layers"),
]


@pytest.mark.parametrize("changed", CHANGED, ids=[cls.__name__ for cls in CHANGED])
def test_a_class_whose_signature_has_changed_is_reported_and_not_probed(changed: type[nn.Module]):
    entries = take_inventory([nn.Sequential(changed())], ["*"])
    (row,) = module_rows(entries, {})
    assert row["status"] == "not_called"
    assert row["reason"].startswith(f"{MISFIT} {changed.__module__.partition('.')[0]} of unknown version")
    assert "forward(hidden_states, scales) in place of forward(" in row["reason"]
    assert len(misfits(entries)) == 1
    assert not entries[0].selected


def test_a_missing_attribute_is_a_misfit_too():
    module = upstream.QATLinear(K, OUT)
    del module.group_size
    adapter = adapter_of(module)
    assert adapter is not None
    assert adapter.misfit(module).endswith("QATLinear has no attribute group_size (verl 0.9.1)")


def test_torchaos_own_classes_fit(recwarn: pytest.WarningsRecorder):
    prototype = pytest.importorskip("torchao.prototype.qat")
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    names = {s.class_name for a in ADAPTERS for s in a.signatures if s.package == "torchao"}
    config = prototype.MXFakeQuantizeConfig()
    modules = [
        prototype.MXFakeQuantizedLinear(K, OUT, activation_config=config, weight_config=config),
        prototype.NVFP4FakeQuantizedLinear(
            *(K, OUT),
            activation_config=prototype.NVFP4FakeQuantizeConfig(),
            weight_config=prototype.NVFP4FakeQuantizeConfig(),
        ),
        FakeQuantizedLinear(K, OUT),
    ]
    assert names == {type(module).__name__ for module in modules}
    for module in modules:
        adapter = adapter_of(module)
        assert adapter is not None
        assert adapter.family == "torchao fake-quantized"
        assert adapter.misfit(module) == ""


def test_what_a_module_holds_is_read_without_running_its_properties():
    class Trap(nn.Linear):
        @property
        def weight(self) -> Any:
            raise AssertionError("a property of the user's was run")

        @weight.setter
        def weight(self, value: Any) -> None:
            self._parameters["weight"] = value

    module = Trap.__new__(Trap)
    nn.Module.__init__(module)
    module._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert held(module, "weight") is module._parameters["weight"]
    assert held(module, "absent", 3) == 3


def test_a_model_of_which_nothing_is_measured_says_why():
    from mxprobe.attribution.coverage import coverage_of

    rows = module_rows(take_inventory([nn.Sequential(CHANGED[0](), nn.Embedding(8, K))], ["*"]), {})
    coverage = coverage_of(pd.DataFrame(rows))
    assert coverage.flops_frac == 0.0
    assert coverage.because.startswith(f"{MISFIT} transformer_engine")
    covered = coverage_of(pd.DataFrame(module_rows(take_inventory([nn.Linear(K, OUT)], ["*"]), {})))
    assert (covered.flops_frac, covered.because) == (0.0, "its name matches none of the layer patterns")
