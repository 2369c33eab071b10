"""Attention's products against numpy in float64, and the modules in which they are found."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxprobe
from mxprobe.emulation import Operand, Recipe
from mxprobe.emulation.attention import emulated_attention
from mxprobe.emulation.linear import Plan, emulated_linear
from mxprobe.emulation.recipe import ROLES
from mxprobe_kernels.reference import decompose
from tests.reference_formats import quantize

# B batch, H heads, T queries, S keys, D head dimension; nothing a multiple of 32.
B, H, T, S, D = 2, 2, 37, 41, 24
Array = Any


def draw(*shape: int, seed: int) -> torch.Tensor:
    """float64 that float32 holds, so that the quantizer rounds no input."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def by_hand(x: Array, operand: Operand, axis: int) -> Array:
    if operand.is_high_precision:
        return x
    if operand.format == "mxfp4":
        return decompose(x, rule=operand.rule, axis=axis).q
    return quantize(x, operand.format, rule=operand.rule, axis=axis)


@pytest.mark.parametrize(
    "line", ["none", "paper", "fwd=hif4 g=mxfp6_e3m2/rceil", "qat", *(f"{role}=mxfp4/rceil" for role in ROLES)]
)
def test_a_product_and_its_gradients_match_a_float64_hand_computation(line: str) -> None:
    r = Recipe.parse(line)
    a, b, g = draw(B, H, T, D, seed=0), draw(B, H, S, D, seed=1), draw(B, H, T, S, seed=2)
    y = emulated_linear(a.requires_grad_(), b.requires_grad_(), None, Plan.of(r))
    da, db = torch.autograd.grad(y, (a, b), g)
    A, M, G = (t.detach().numpy() for t in (a, b, g))
    w_axis, x_axis = (-1 if operand.as_forward else -2 for operand in (r.w_dgrad, r.x_wgrad))
    expected = by_hand(A, r.x_fwd, -1) @ by_hand(M, r.w_fwd, -1).swapaxes(-1, -2)
    expected_da = by_hand(G, r.g_dgrad, -1) @ by_hand(M, r.w_dgrad, w_axis)
    expected_db = by_hand(G, r.g_wgrad, -2).swapaxes(-1, -2) @ by_hand(A, r.x_wgrad, x_axis)
    for got, want in ((y.detach(), expected), (da, expected_da), (db, expected_db)):
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-11)


def test_forward_attention_matches_a_float64_hand_computation() -> None:
    recipe = Recipe.parse("x_fwd=mxfp4/rceil w_fwd=mxfp4/floor")
    q, k, v = draw(B, H, T, D, seed=0), draw(B, H, S, D, seed=1), draw(B, H, S, D, seed=2)
    got = emulated_attention(q, k, v, plan=Plan.of(recipe), is_causal=True)

    Q, K, V = (t.numpy() for t in (q, k, v))
    scores = by_hand(Q, recipe.x_fwd, -1) @ by_hand(K, recipe.w_fwd, -1).swapaxes(-1, -2) / np.sqrt(D)
    scores = np.where(np.tri(T, S, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    # P in blocks along the keys, V along the keys too; float32 is what the quantizer reads of P.
    expected = by_hand(p, recipe.x_fwd, -1) @ by_hand(V, recipe.w_fwd, -2)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.arange(T * S).reshape(T, S) % 3 > 0},
        {"attn_mask": draw(1, 1, T, S, seed=9)},
        {"attn_mask": (torch.arange(T) > 4)[:, None].expand(T, S)},  # five rows see nothing
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "scale", "bool mask", "float mask", "blind rows", "gqa"],
)
def test_with_nothing_quantized_it_is_torch_s_attention(options: dict[str, Any]) -> None:
    n_kv = 1 if options.get("enable_gqa") else H
    q, k, v = draw(B, H, T, D, seed=0), draw(B, n_kv, S, D, seed=1), draw(B, n_kv, S, D, seed=2)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, **options)
    got = emulated_attention(*inputs, **options, plan=Plan.of(Recipe()))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    g = draw(B, H, T, D, seed=3)
    for ours, theirs in zip(torch.autograd.grad(got, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class SelfAttention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) if self.kind == "matmul" else q @ k.transpose(-2, -1)
            scores = scores / 4 + torch.full(scores.shape[-2:], -torch.inf).triu(1)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str = "sdpa", *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SelfAttention(kind) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x))
        return x


X = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(5))


def passed(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(X)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", ["sdpa", "matmul", "operator"])
def test_every_way_of_multiplying_is_seen_and_gives_the_same(kind: str) -> None:
    model = Model(kind)
    plain = passed(model)
    with mxprobe.emulate(model, "paper") as emulation:
        linears_alone = passed(model)
        emulation.set("paper attention=on", now=True)
        emulated = passed(model)
        assert "layers.1 SelfAttention  (its products q k^T and p v)" in emulation.report()
        assert emulation.products_seen() == dict.fromkeys(("layers.0", "layers.1"), 1 if kind == "sdpa" else 2)
        emulation.set("paper", now=True)
        assert all(map(torch.equal, passed(model), linears_alone))
    assert all(map(torch.equal, passed(model), plain))
    change = (emulated[0] - linears_alone[0]).norm() / plain[0].norm()
    assert 0.001 < change < 0.3
    if kind != "sdpa":
        with mxprobe.emulate(Model("sdpa"), "paper attention=on") as other:
            torch.testing.assert_close(passed(other.model)[0], emulated[0], rtol=0, atol=1e-4)


def test_none_with_attention_is_bit_identical() -> None:
    model = Model()
    plain = passed(model)
    with mxprobe.emulate(model, "none attention=on"):
        assert all(map(torch.equal, passed(model), plain))


def test_recomputed_attention_is_the_same_also_when_rounded_stochastically() -> None:
    line = "all=mxfp4/rceil+sr attention=on"
    results = []
    for is_checkpointed in (False, True):
        with mxprobe.emulate(Model(is_checkpointed=is_checkpointed), line) as emulation:
            results.append(passed(emulation.model))
    assert all(map(torch.equal, *results))


def test_square_blocks_stay_within_a_head() -> None:
    plan = Plan.of(Recipe.parse("fwd=mxfp4/rceil+2d"))
    a, b = draw(1, 3, T, D, seed=0), draw(1, 3, S, D, seed=1)
    together = emulated_linear(a, b, None, plan)
    for head in range(3):
        assert torch.equal(together[:, head], emulated_linear(a[0, head], b[0, head], None, plan)[None])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_attention_has_the_products() -> None:
    model = Model()
    with mxprobe.emulate(model, "paper attention=on"):
        expected = passed(model)
        got = passed(torch.compile(model, backend="aot_eager"))
    for ours, want in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_reached_is_said() -> None:
    class Flash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = SelfAttention("sdpa")
            self.self_attn.config = type("Config", (), {"_attn_implementation": "flash_attention_2"})()
            self.other = nn.MultiheadAttention(32, 2)

    report = mxprobe.emulate(Flash(), "paper attention=on").report()
    assert "left out  self_attn SelfAttention: attention implementation 'flash_attention_2' multiplies inside" in report
    assert "left out  other MultiheadAttention: nn.MultiheadAttention multiplies inside one function of torch" in report


def test_a_second_derivative_is_refused_in_words() -> None:
    a, b = (draw(1, 4, 8, seed=i).requires_grad_() for i in (0, 1))
    y = emulated_linear(a, b, None, Plan.of(Recipe.parse("paper")))
    with pytest.raises(RuntimeError, match="an emulated attention product cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), a, create_graph=True)


def test_the_flag_reads_back() -> None:
    recipe = Recipe.parse("paper attention=on")
    assert str(recipe) == "paper attention=on"
    operands = "\n".join(f'{role} = "{operand}"' for role, operand in recipe.operands.items())
    toml = f'name = "paper"\nattention = true\n[operands]\n{operands}'
    assert Recipe.parse(str(recipe)) == Recipe.from_toml(toml) == recipe
