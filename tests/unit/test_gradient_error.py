"""The error of dW and dX: against autograd with quantized operands, and what is derived from its sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.attribution.gradient_ratios import gradient_ratios
from mxprobe.measuring.operands.gradient_error import DGRAD, WGRAD, gradient_error
from mxprobe_kernels import error_fields
from tests import small_lm


class QuantizedBackward(torch.autograd.Function):
    """Y = X W^T exactly; dX and dW from quantized operands, blocks along each GEMM's contraction axis."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        flat_x, g = x.flatten(0, 1), grads[0].flatten(0, 1)

        def q(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return mxprobe_kernels.quantize_dequantize(tensor, dim=dim)[0]

        return (q(g, 1) @ q(w, 0)).reshape(x.shape), q(g, 0).T @ q(flat_x, 0)


def test_it_is_the_error_that_autograd_makes_in_one_layer():
    model, ids = small_lm.trained(), small_lm.batch(16, 10**6)
    module = small_lm.linears(model)["layers.2.up"]
    seen: dict[str, torch.Tensor] = {}

    def watch(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen["x"] = args[0].detach().flatten(0, 1)
        output.register_hook(lambda g: seen.__setitem__("g", g.flatten(0, 1)))

    def gradient(hook: Any) -> torch.Tensor:
        handle = module.register_forward_hook(hook)
        try:
            loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            (dw,) = torch.autograd.grad(loss, [module.weight])
        finally:
            handle.remove()
        return dw.double()

    exact = gradient(watch)
    quantized = gradient(lambda module, args, output: QuantizedBackward.apply(args[0], module.weight))
    left, right = error_fields(seen["g"].T.contiguous()), error_fields(seen["x"].T.contiguous())
    row = next(iter(gradient_error(WGRAD, left, right)))
    assert row["component"] == "total"
    assert row["ref2"] == pytest.approx(float(exact.square().sum()), rel=1e-3)
    assert row["err2"] == pytest.approx(float((quantized - exact).square().sum()), rel=1e-3)
    assert row["ref_err"] == pytest.approx(float((exact * (quantized - exact)).sum()), rel=1e-2)

    derived = gradient_ratios(pd.DataFrame([{"module": "m", **row}])).iloc[0]
    assert derived["relative_l2"] == pytest.approx(float((quantized - exact).norm() / exact.norm()), rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(exact.flatten(), quantized.flatten(), dim=0)
    assert derived["cosine"] == pytest.approx(float(cosine), rel=1e-4)
    assert derived["log2_norm_ratio"] == pytest.approx(math.log2(quantized.norm() / exact.norm()), abs=1e-3)
    assert derived["projection_gain"] == pytest.approx(
        float((exact * quantized).sum() / exact.square().sum()), rel=1e-4
    )


def operands(rows: int, *, signal: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """G [rows, 24], X [rows, 40]: a gradient common to all tokens, times `signal`, in noise."""
    generator = torch.Generator().manual_seed(seed)
    common_g, common_x = torch.randn(1, 24, generator=generator), torch.randn(1, 40, generator=generator)
    g = signal * common_g + torch.randn(rows, 24, generator=generator)
    return g, signal * common_x + torch.randn(rows, 40, generator=generator)


def ratios(rows: int, signal: float) -> pd.Series:
    g, x = operands(rows, signal=signal)
    found = pd.DataFrame(list(gradient_error(WGRAD, error_fields(g.T.contiguous()), error_fields(x.T.contiguous()))))
    found = gradient_ratios(found.assign(module="m"))
    return found.set_index("component").loc["total"]


def test_components_put_in_alone_and_their_products():
    g, x = operands(64)
    left, right = error_fields(g.T.contiguous()), error_fields(x.T.contiguous())
    rows = {row["component"]: row for row in gradient_error(WGRAD, left, right)}
    assert set(rows) == {"total", "scale", "deadzone", "grid"}
    exact = g.T.double() @ x.double()
    for component, e_left, e_right in (
        ("scale", left.e_scale, right.e_scale),
        ("deadzone", left.e_dz, right.e_dz),
        ("grid", left.e_grid, right.e_grid),
    ):
        error = (left.x + e_left) @ (right.x + e_right).T - exact
        assert rows[component]["err2"] == pytest.approx(float(error.square().sum()), rel=1e-9)


def test_halves_tell_signal_from_noise():
    clear, lost = ratios(256, 1.0), ratios(256, 0.0)
    assert clear["half_cosine"] > 0.8
    assert clear["sampling_noise"] < 0.3
    assert not clear["is_withheld"]
    assert abs(lost["half_cosine"]) < 0.2
    assert lost["sampling_noise"] > 0.8
    assert lost["is_withheld"]


def test_one_tile_and_dgrad_have_no_halves():
    g, x = operands(32)
    for gemm, left, right in ((WGRAD, g.T, x.T), (DGRAD, g, torch.randn(40, 24))):
        rows = list(gradient_error(gemm, error_fields(left.contiguous()), error_fields(right.contiguous())))
        assert all(math.isnan(row["half_ab"]) for row in rows)
        derived = gradient_ratios(pd.DataFrame(rows).assign(module="m"))
        assert not derived["is_withheld"].any()
        assert derived["relative_l2"].between(0.001, 1.0).all()


def test_sums_are_added_before_they_are_divided():
    one = {"module": "m", "gemm": WGRAD, "component": "total", "half_a2": 1.0, "half_b2": 1.0, "half_ab": 0.5}
    frame = pd.DataFrame(
        [{**one, "ref2": 1.0, "err2": 1.0, "ref_err": 0.0}, {**one, "ref2": 9.0, "err2": 0.0, "ref_err": 0.0}]
    )
    assert gradient_ratios(frame)["relative_l2"].tolist() == [pytest.approx(math.sqrt(0.1))]


def test_a_gradient_of_zero_has_no_ratios():
    zero = error_fields(torch.zeros(8, 64))
    derived = gradient_ratios(pd.DataFrame(list(gradient_error(WGRAD, zero, zero))).assign(module="m"))
    assert np.isnan(derived["relative_l2"]).all()
    assert not derived["is_withheld"].any()
