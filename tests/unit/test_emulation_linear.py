"""The three GEMMs of an emulated Linear against numpy in float64, role by role."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxprobe.emulation import NAMED_RECIPES, Operand, Recipe
from mxprobe.emulation.linear import Plan, emulated_linear
from mxprobe.emulation.recipe import ROLES
from mxprobe_kernels import apply_correction
from mxprobe_kernels.reference import decompose
from tests.reference_formats import quantize

# B batch, T tokens, K in-features, N out-features; none a multiple of 32, so that every GEMM has a ragged block.
B, T, K, N = 2, 35, 40, 72
RECIPES = (
    *NAMED_RECIPES,
    *(f"{role}=mxfp4/rceil" for role in ROLES),
    "paper fwd=mxfp4/even g=mxfp4/rceil+mbs:128 x_wgrad=mxfp8/rceil w_dgrad=mxfp4/rceil+of:0.5",
    "paper wgrad=mxfp4/rceil+had:32",
    *(f"{role}=hif4" for role in ROLES),
    "fwd=nvfp4_4over6 dgrad=mxfp4_4over6/rceil wgrad=mxfp6_e3m2/floor",
    "fwd=mxfp6_e3m2/rceil dgrad=nvfp4_4over6 wgrad=mxfp4_4over6/even",
)

Array = Any


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """x [B, T, K], w [N, K], b [N], g [B, T, N]: float32 values, so that the quantizer rounds no input."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, K), (N, K), (N,), (B, T, N))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def by_hand(x: Array, operand: Operand, axis: int) -> Array:
    """Q(x) in float64 by the reference, by ml_dtypes' casts, or by the kernels' corrections."""
    if operand.is_high_precision:
        return x
    if operand.corrections:
        (correction,) = operand.corrections
        return apply_correction(torch.from_numpy(x), correction, rule=operand.rule, dim=axis).double().numpy()
    if operand.format == "mxfp4":
        return decompose(x, rule=operand.rule, axis=axis).q
    if operand.format not in ("mxfp8", "nvfp4"):
        return quantize(x, operand.format, rule=operand.rule, axis=axis)
    block = 32 if operand.format == "mxfp8" else 16
    moved = np.moveaxis(x, axis, -1)
    length = moved.shape[-1]
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -length % block)])
    blocks = padded.reshape(*padded.shape[:-1], -1, block)
    amax = np.abs(blocks).max(-1, keepdims=True)
    if operand.format == "mxfp8":
        fraction, power = np.frexp(np.where(amax > 0, amax, 1.0) / 448.0)
        scale = np.exp2(np.where(fraction == 0.5, power - 1, power))
        q = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale
    else:
        unit = float(np.float32(np.float32(np.abs(x).max()) / np.float32(448.0 * 6.0)))
        scale = (amax / 6.0 / unit).astype(ml_dtypes.float8_e4m3fn).astype(float) * unit
        scale = np.where(scale > 0, scale, unit * 2.0**-9)
        q = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(float) * scale
    return np.moveaxis(q.reshape(padded.shape)[..., :length], -1, axis)


@pytest.mark.parametrize("line", RECIPES)
def test_all_three_gemms_match_a_float64_hand_computation(line: str) -> None:
    recipe = Recipe.parse(line)
    x, w, b, g = (t.requires_grad_() for t in tensors())
    y = emulated_linear(x, w, b, Plan.of(recipe))
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g.detach())

    X, W, G = (t.detach().numpy() for t in (x, w, g))
    tokens, g_rows = X.reshape(-1, K), G.reshape(-1, N)
    w_axis = -1 if recipe.w_dgrad.as_forward else 0
    x_axis = -1 if recipe.x_wgrad.as_forward else 0
    expected_y = by_hand(X, recipe.x_fwd, -1) @ by_hand(W, recipe.w_fwd, -1).T + b.detach().numpy()
    expected_dx = by_hand(g_rows, recipe.g_dgrad, -1) @ by_hand(W, recipe.w_dgrad, w_axis)
    expected_dw = by_hand(g_rows, recipe.g_wgrad, 0).T @ by_hand(tokens, recipe.x_wgrad, x_axis)
    np.testing.assert_allclose(y.detach().numpy(), expected_y, rtol=0, atol=1e-11)
    np.testing.assert_allclose(dx.numpy().reshape(-1, K), expected_dx, rtol=0, atol=1e-11)
    np.testing.assert_allclose(dw.numpy(), expected_dw, rtol=0, atol=1e-11)
    np.testing.assert_allclose(db.numpy(), g_rows.sum(0), rtol=0, atol=1e-11)


def test_dgrad_uses_the_quantized_weight_not_the_master() -> None:
    x, w, b, g = (t.requires_grad_() for t in tensors())
    quantized = torch.autograd.grad(emulated_linear(x, w, b, Plan.of(Recipe.parse("w_dgrad=mxfp4"))), x, g)[0]
    master = torch.autograd.grad(F.linear(x, w, b), x, g)[0]
    assert 0.05 < (quantized - master).norm() / master.norm() < 0.3


def test_qat_equals_fake_quantization_with_straight_through_gradients() -> None:
    """Against autograd itself: F.linear of Q(x) and Q(w), gradients copied through Q. Bit for bit in float32."""
    x, w, b, g = (t.requires_grad_() for t in tensors(torch.float32))

    def through(t: torch.Tensor) -> torch.Tensor:
        return t + (apply_correction(t, "rule:rceil") - t).detach()

    y = emulated_linear(x, w, b, Plan.of(NAMED_RECIPES["qat"]))
    expected = F.linear(through(x), through(w), b)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    for got, want in zip(
        torch.autograd.grad(y, (x, w, b), g), torch.autograd.grad(expected, (x, w, b), g), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradcheck_where_nothing_is_rounded(with_bias: bool) -> None:
    """With the identity for Q the function's three products must be the Linear's own derivative."""
    x, w, b, _ = tensors()
    x, w = (t[..., :3].clone().requires_grad_() for t in (x, w))
    bias = b.requires_grad_() if with_bias else None
    plan = Plan.of(Recipe())
    assert torch.autograd.gradcheck(lambda *a: emulated_linear(*a, plan), (x[:, :4], w, bias))


@pytest.mark.parametrize("line", ["paper", "qat", "nvfp4"])
def test_the_gradient_is_that_of_the_linear_map_at_quantized_operands(line: str) -> None:
    """STE contract: dX is the transpose of the exactly linear map x -> x Q(W)^T, checked by its Jacobian."""
    recipe = Recipe.parse(line)
    x, w, b, _ = tensors()
    x = x[0, :3]
    axis = -1 if recipe.w_dgrad.as_forward else 0
    q_w = torch.from_numpy(by_hand(w.numpy(), recipe.w_dgrad, axis))
    jacobian = torch.autograd.functional.jacobian(lambda t: F.linear(t, q_w, b), x)
    plan = Plan.of(Recipe.parse(f"fwd={recipe.x_fwd} w_dgrad={recipe.w_dgrad}"))
    got = torch.autograd.functional.jacobian(lambda t: emulated_linear(t, w, b, plan), x)
    torch.testing.assert_close(got, jacobian, rtol=0, atol=1e-12)


def test_only_what_is_asked_for_is_computed() -> None:
    x, w, b, g = tensors()
    y = emulated_linear(x, w.requires_grad_(), b, Plan.of(NAMED_RECIPES["paper"]))
    y.backward(g)
    assert w.grad is not None
    assert x.grad is None


def test_a_second_derivative_is_refused_in_words() -> None:
    x, w, b, _ = (t.requires_grad_() for t in tensors())
    y = emulated_linear(x, w, b, Plan.of(Recipe.parse("paper")))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_autocast_casts_first_and_quantizes_after() -> None:
    x, w, b, _ = (t.requires_grad_() for t in tensors(torch.float32))
    plan = Plan.of(NAMED_RECIPES["paper"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = emulated_linear(x, w, b, plan)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, emulated_linear(x.bfloat16(), w.bfloat16(), b.bfloat16(), plan))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == w.dtype == torch.float32
