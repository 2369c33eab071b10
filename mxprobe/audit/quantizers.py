"""A quantizer and a Linear that uses one, put to the test on values of our own: which rule, and which known mistakes.

    infer_rule(x, q)            which of the known quantizers reproduces q of x bit for bit
    audit_quantizer(quantize)   blocks that cross rows, an eps inside log2, a fixed seed, no straight-through estimator
    audit_linear(module)        what its backward pass multiplies with

For quantizers that can be called: torchao's, a framework's fake-quantized Linear, your own. What a run does is told
from its trace, by `audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.measuring.recipes import CORRECTED, EXACT_FRAC, OTHER_FORMATS, RULES, Call, infer_recipe, quantize
from mxprobe_kernels.recipe_grammar import NONE

from .pitfalls import PITFALLS, Finding

Quantizer = Callable[[torch.Tensor], torch.Tensor]

CANDIDATES: tuple[str, ...] = (*RULES, *CORRECTED, *OTHER_FORMATS)
N_ROWS = 64
SMALL = 2.0**-60
"""Of gradients in a large model; exact to multiply with."""
_SEED = 0
_SHORTEST_BLOCK = 16
_BETWEEN = 2.25


class RuleFit(NamedTuple):
    exact: tuple[str, ...]
    """Every known quantizer that gives q bit for bit: more than one where the values do not tell them apart."""
    closest: str
    residual_frac: float
    """||q - closest(x)||^2 / ||q - x||^2; 0 where exact."""


def infer_rule(x: torch.Tensor, q: torch.Tensor) -> RuleFit:
    """Return which rules fit x and its dequantized q, [rows, K], blocks along K. 64 ordinary blocks tell all apart."""
    x64, q64 = x.detach().double(), q.detach().double()
    error = float((q64 - x64).square().sum()) or 1.0
    distance = {
        name: float((q64 - quantize(x.detach().float(), name).double()).square().sum()) / error for name in CANDIDATES
    }
    exact = tuple(name for name, value in distance.items() if value == 0.0)
    closest = exact[0] if exact else min(distance, key=distance.__getitem__)
    return RuleFit(exact, closest, distance[closest])


def audit_quantizer(quantizer: Quantizer, *, name: str = "") -> tuple[Finding, ...]:
    """Return known mistakes of a function x [rows, K] -> dequantized x. Its random state is the caller's affair."""
    found = [*_rule(quantizer), *_rows(quantizer), *_small(quantizer), *_seed(quantizer), *_gradient(quantizer)]
    return tuple(Finding(PITFALLS[slug], (name,) if name else (), detail) for slug, detail in found)


def audit_linear(module: nn.Linear, *, name: str = "") -> tuple[Finding, ...]:
    """Return known mistakes of a fake-quantized Linear, from one forward and backward pass on random values.

    Gradients are taken without touching `.grad`, and the global random state is put back.
    """
    weight = module.weight
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(_SEED)
        x = torch.randn(N_ROWS, module.in_features, dtype=weight.dtype, device=weight.device, requires_grad=True)
        g = torch.randn(N_ROWS, module.out_features, dtype=weight.dtype, device=weight.device)
        with torch.enable_grad():
            y = module(x)
            dx, dw = torch.autograd.grad(y, (x, weight), g.to(y.dtype), allow_unused=True)
    bias: Any = module.bias  # None without one, whatever its annotation says
    plain = y.detach() if bias is None else y.detach() - bias.detach()
    recipe, sums = infer_recipe(Call(x.detach(), weight.detach(), plain, y.dtype))
    named = (name,) if name else ()
    return tuple(
        Finding(PITFALLS[slug], named, detail)
        for slug, detail in _backward(weight.detach(), g, dx, dw, recipe[1] if sums["exact"] else NONE)
    )


def _backward(
    w: torch.Tensor, g: torch.Tensor, dx: torch.Tensor | None, dw: torch.Tensor | None, recipe: str
) -> Iterator[tuple[str, str]]:
    silent = [what for what, grad in (("input", dx), ("weight", dw)) if grad is None or not bool(grad.any())]
    if silent:
        yield "no_straight_through", f"no gradient reaches its {' and '.join(silent)}"
    if dx is None or recipe == NONE:
        return
    across = lambda v: quantize(v.T.contiguous(), recipe).T  # noqa: E731  blocks along out-features
    ways = {
        "rows": quantize(w, recipe),
        "columns": across(w),
        "weight_restored_before_backward": w,
        "transposed_requantized": across(quantize(w, recipe)),
    }
    of_g = (g, quantize(g, recipe))
    fits = {way: min(_distance(dx, left.double() @ right.double()) for left in of_g) for way, right in ways.items()}
    best = min(fits, key=fits.__getitem__)
    details = {
        "weight_restored_before_backward": "its forward multiplies with Q(W), its backward with W",
        "transposed_requantized": "its backward multiplies with Q(Q(W)^T), which is neither Q(W) nor Q(W^T)",
    }
    if fits[best] <= EXACT_FRAC and best in details:
        yield best, details[best]


def _distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).square().sum()) / max(float(expected.square().sum()), 1e-300)


def _values(rows: int = N_ROWS, columns: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(rows, columns, generator=generator)


def _rule(quantizer: Quantizer) -> Iterator[tuple[str, str]]:
    x = _values()
    if infer_rule(x, quantizer(x)).exact == ("mxfp4+floor_div",):
        yield "floor_div", "it rounds as that rule does, bit for bit"


def _rows(quantizer: Quantizer) -> Iterator[tuple[str, str]]:
    """Test rows whose length is no multiple of the block; the largest value of the tensor stays where it is."""
    if _is_random(quantizer):
        return  # it moves without a change
    x = _values(4, 40)
    x[3, 0] = 64.0
    other = x.clone()
    other[1] *= 8.0
    try:
        moved = quantizer(x)[0] != quantizer(other)[0]
    except (RuntimeError, ValueError, AssertionError):
        return  # it does not take such rows
    if bool(moved.any()):
        yield "blocks_cross_rows", "a row of 40 is rounded otherwise when only the next row has changed"


def _small(quantizer: Quantizer) -> Iterator[tuple[str, str]]:
    x = _values()
    if _is_random(quantizer):
        return
    small, plain = quantizer(x * SMALL) / SMALL, quantizer(x)
    if not torch.equal(small, plain):
        zeros = float((small == 0).double().mean())
        yield "eps_in_log2", f"values 2^-60 times as large are rounded otherwise: {zeros:.0%} of them to zero"


def _between() -> torch.Tensor:
    """Return the values a quarter of the way from one number of the grid to the next, under a scale of 1."""
    x = torch.full((N_ROWS, 64), _BETWEEN)
    x[:, ::_SHORTEST_BLOCK] = 6.0
    return x


def _is_random(quantizer: Quantizer) -> bool:
    """Whether equal values of a block go to two numbers, one on either side."""
    q = quantizer(_between()).detach().reshape(N_ROWS, -1, _SHORTEST_BLOCK)[..., 1:]
    sides = q.unique()
    return len(sides) == 2 and float(sides[0]) <= _BETWEEN <= float(sides[1])


def _seed(quantizer: Quantizer) -> Iterator[tuple[str, str]]:
    if _is_random(quantizer) and torch.equal(quantizer(_between()), quantizer(_between())):
        yield "zero_seed_rounding", "stochastic rounding draws the same numbers in every call"


def _gradient(quantizer: Quantizer) -> Iterator[tuple[str, str]]:
    x = _values().requires_grad_()
    with torch.enable_grad():
        q = quantizer(x)
        grad = torch.autograd.grad(q.sum(), x, allow_unused=True)[0] if q.requires_grad else None
    if grad is None or not bool(grad.any()):
        yield "no_straight_through", "no gradient comes through it"
