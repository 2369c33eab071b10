"""Rule inference on every quantizer we know and on other libraries' own; planted mistakes of quantizers and Linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.audit.quantizers import CANDIDATES, audit_linear, audit_quantizer, infer_rule
from mxprobe.measuring.recipes import RULES, quantize

MX = "mxfp4+rceil"


def values() -> torch.Tensor:
    """64 blocks of 32."""
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_known_quantizer_is_named_from_64_blocks(name: str):
    fit = infer_rule(values(), quantize(values(), name))
    same = {"mxfp4+oas": "mxfp4+even"}  # equal but at an exact tie
    assert name in fit.exact
    assert set(fit.exact) <= {name, same.get(name, name), *(a for a, b in same.items() if b == name)}
    assert fit.residual_frac == 0.0


def test_what_no_rule_gives_is_called_closest_only():
    fit = infer_rule(values(), quantize(values(), "mxfp4+floor") + 1e-3)
    assert fit.exact == ()
    assert fit.closest == "mxfp4+floor"
    assert 0 < fit.residual_frac < 0.01


@pytest.mark.parametrize("mode", ["RCEIL", "FLOOR", "EVEN", "CEIL"])
def test_torchao_s_rules(mode: str):
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scaling = config.ScaleCalculationMode[mode]
    q = mx.MXTensor.to_mx(values(), torch.float4_e2m1fn_x2, 32, scaling).dequantize(torch.float32)
    assert infer_rule(values(), q).exact[0] == f"mxfp4+{mode.lower()}"


@pytest.mark.slow  # its import takes seconds
def test_compressed_tensors_rounds_the_maximum_to_even():
    """The rule of llm-compressor and vLLM."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    scheme = schemes.preset_name_to_scheme("MXFP4", ["Linear"]).weights
    groups = values().reshape(16, -1, 32)
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), scheme)
    assert infer_rule(values(), forward.fake_quantize(values(), scale, zero, scheme)).exact[0] == "mxfp4+even"


class Straight(torch.autograd.Function):
    """Q(x) forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return quantizer(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def straight(quantizer: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: Straight.apply(x, quantizer)


def across_rows(x: torch.Tensor) -> torch.Tensor:
    n = x.numel()
    flat = F.pad(x.reshape(-1), (0, -n % 32)).reshape(-1, 32)
    return quantize(flat, MX).reshape(-1)[:n].reshape(x.shape)


def on_the_grid(x: torch.Tensor, *, eps: float = 0.0, drawn: torch.Tensor | float = 0.5) -> torch.Tensor:
    """Blocks of 32 over whatever rows there are; rounded to nearest with `drawn` one half."""
    blocks = x.reshape(-1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6.0 + eps)))
    y = blocks / scale
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    return ((torch.floor(y / step + drawn) * step).clamp(-6, 6) * scale).reshape(x.shape)


def with_eps(x: torch.Tensor) -> torch.Tensor:
    return on_the_grid(x, eps=1e-8) if x.shape[-1] % 32 == 0 else quantize(x, MX)


def stochastic(x: torch.Tensor, seed: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    return on_the_grid(x, drawn=torch.rand(x.numel() // 32, 32, generator=generator))


QUANTIZERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[str]]] = {
    **{name: (straight(lambda x, name=name: quantize(x, name)), set()) for name in RULES if name != "mxfp4+floor_div"},
    "nvfp4": (straight(lambda x: quantize(x, "nvfp4")), set()),
    "floor_div": (straight(lambda x: quantize(x, "mxfp4+floor_div")), {"floor_div"}),
    "across rows": (straight(across_rows), {"blocks_cross_rows"}),
    "eps": (straight(with_eps), {"eps_in_log2"}),
    "stochastic": (straight(lambda x: stochastic(x, None)), set()),
    "zero seed": (straight(lambda x: stochastic(x, 0)), {"zero_seed_rounding"}),
    "no straight-through estimator": (lambda x: quantize(x, MX) + 0.0 * x, {"no_straight_through"}),
    "out of the graph": (lambda x: quantize(x.detach(), MX), {"no_straight_through"}),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantizer_s_mistake_is_named_and_nothing_else(name: str):
    torch.manual_seed(0)
    quantizer, expected = QUANTIZERS[name]
    found = audit_quantizer(quantizer, name="q")
    assert {finding.pitfall.slug for finding in found} == expected, found
    assert all(finding.modules == ("q",) and finding.pitfall.symptom for finding in found)


class Fake(nn.Linear):
    """y = Q(x) Q(W)^T; the backward pass multiplies G with what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__(64, 96)
        with torch.no_grad():
            self.weight *= torch.exp2(torch.randint(-3, 3, (96, 1)))  # rows of one scale are alike along both axes
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self.how) + self.bias


def columns(w: torch.Tensor) -> torch.Tensor:
    return quantize(w.T.contiguous(), MX).T


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, how: str) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        return quantize(x, MX) @ quantize(w, MX).T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (g,), (x, w) = grads, ctx.saved_tensors
        ways = {
            "rows": quantize(w, MX),
            "columns": columns(w),
            "restored": w,
            "requantized": columns(quantize(w, MX)),
            "no x": torch.zeros_like(w),
        }
        dw = g.T @ quantize(x, MX)
        left = quantize(g, MX) if ctx.how == "columns" else g
        return left @ ways.get(ctx.how, w), dw * (ctx.how != "no w"), None


LINEARS: dict[str, set[str]] = {
    "rows": set(),
    "columns": set(),
    "restored": {"weight_restored_before_backward"},
    "requantized": {"transposed_requantized"},
    "no x": {"no_straight_through"},
}


@pytest.mark.parametrize("how", LINEARS)
def test_a_linear_s_mistake_is_named_and_nothing_else(how: str):
    torch.manual_seed(0)
    module = Fake(how)
    state = torch.get_rng_state()
    found = audit_linear(module, name="layers.0.up_proj")
    assert {finding.pitfall.slug for finding in found} == LINEARS[how], found
    assert torch.equal(torch.get_rng_state(), state)
    assert module.weight.grad is None


def test_plain_and_fake_quantized_linears_of_torchao_are_clean():
    assert audit_linear(nn.Linear(64, 32)) == ()
    qat = pytest.importorskip("torchao.quantization.qat")
    prototype = pytest.importorskip("torchao.prototype.qat")
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    config = prototype.MXFakeQuantizeConfig()
    quantize_(model, qat.QATConfig(weight_config=config, activation_config=config, step="prepare"))
    assert type(model[0]).__name__ == "MXFakeQuantizedLinear"
    assert audit_linear(model[0]) == ()
