"""What a layer really did: its output against the exact product, and the recipe that explains it.

    ref = x W^T      realised = y - b - ref      predicted = Qx(x) Qw(W)^T - ref      residual = y - b - Qx(x) Qw(W)^T

The recipe (Qx, Qw) is the pair that minimises the residual on a few rows and features; it is *exact* when the
residual is below 1e-5 of the reference on all sampled rows, which a bfloat16 output still is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mxprobe.events import Event
from mxprobe_kernels.corrections import quantize_operand
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import NONE, Operand

EXACT_FRAC = 1e-5
_PROBE_ROWS = 16
_PROBE_FEATURES = 64

RULES: tuple[str, ...] = tuple(Operand("mxfp4", rule).inferred for rule in Rule)
"""`rceil` first: of rules that agree on the data at hand, the most common is named."""
CORRECTED: tuple[str, ...] = tuple(
    Operand.from_correction(name).inferred
    for name in ("of:0.5", "of:1.0", "mbs:128", "mbs:64", "mbs:32", "had:32", "nvfp4", "mxfp8")
)
"""With `OTHER_FORMATS`, every default what-if that is no rule: a run that follows a recommendation must not look
unexplained."""

OTHER_FORMATS: tuple[str, ...] = ("nvfp4_4over6", "mxfp4_4over6", "hif4", "mxfp6_e2m3", "mxfp6_e3m2")
"""Tried with themselves, with nothing and with plain rules, not in every pair: what a module that nothing explains
costs grows with the pairs."""

OUTPUT_ENERGIES = ("ref2", "realised2", "predicted2", "residual2")
"""The sums of a row of table `outputs`."""

Recipe = tuple[str, str]
"""How x and how W were quantized, each as `Operand.inferred` spells it: `none`, `mxfp4+floor`, `nvfp4`, ..."""


class Call(NamedTuple):
    """A Linear's call on sampled rows and output features; or those of E experts, with an axis E before the others."""

    x: torch.Tensor
    """[R, K]"""
    w: torch.Tensor
    """[O_s, K]"""
    y: torch.Tensor
    """[R, O_s], bias taken off."""
    dtype: torch.dtype = torch.float64
    """In which the layer returned y: what its operands had been rounded to, at least."""
    weights: torch.Tensor | None = None
    """[R]: what each row counts in the sums; None where all count 1."""


def candidates(previous: Recipe | None) -> Iterator[Recipe]:
    """Yield recipes to try: the module's last one, untouched, MXFP4 by rule, corrected, one-sided.

    Then follows every other pair: a correction is often switched on for one operand of a GEMM alone.
    """
    names = (*RULES, *CORRECTED)
    likely: list[Recipe] = [] if previous is None else [previous]
    likely.append((NONE, NONE))
    for name in (*names, *OTHER_FORMATS):
        likely += [(name, name), (NONE, name), (name, NONE)]
    one_plain = [p for other, rule in itertools.product(OTHER_FORMATS, RULES) for p in ((other, rule), (rule, other))]
    pairs = (*itertools.product(names, names), *one_plain)
    yield from dict.fromkeys([*likely, *pairs])


def infer_recipe(call: Call, previous: Recipe | None = None) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and the sums of one row of table `outputs`: ref2, realised2, predicted2, residual2, exact.

    Where y is narrower than x or W (autocast), the product was taken of values rounded to y's dtype. Quantizers
    may come before that rounding or after it, so both orders are tried.
    """
    outputs = Outputs(call)
    small_y = outputs.y[:_PROBE_ROWS, :_PROBE_FEATURES]
    small_ref2 = float(_energy(call.x[:_PROBE_ROWS].double() @ call.w[:_PROBE_FEATURES].double().T))
    best: tuple[float, Recipe, Quantized] | None = None
    for quantized in orders(call):
        for recipe in candidates(previous):
            qx, qw = quantized.pair(recipe, _PROBE_ROWS, _PROBE_FEATURES)
            residual2 = float(_energy(small_y - qx @ qw.T))
            if residual2 <= EXACT_FRAC * small_ref2:
                sums = _named(outputs.sums(recipe, quantized))
                if sums["residual2"] <= EXACT_FRAC * sums["ref2"]:
                    return recipe, {"exact": True, **sums}
            if best is None or residual2 < best[0]:
                best = (residual2, recipe, quantized)
    assert best is not None  # there always is a candidate
    _, recipe, quantized = best
    return recipe, {"exact": False, **_named(outputs.sums(recipe, quantized))}


def _named(sums: torch.Tensor) -> dict[str, float]:
    return dict(zip(OUTPUT_ENERGIES, sums.tolist()))


def output_energies(call: Call, recipe: Recipe) -> torch.Tensor:
    """`OUTPUT_ENERGIES` of each expert under a recipe, float64 [4, E]; of the orders of rounding, the better."""
    outputs, best = Outputs(call), None
    for quantized in orders(call):
        sums = outputs.sums(recipe, quantized)
        best = sums if best is None else torch.where(sums[3] < best[3], sums, best)
    assert best is not None  # there always is an order
    return best


class Outputs:
    """The output of a call beside its exact product, [..., R, O_s]; rows count by their weights."""

    def __init__(self, call: Call) -> None:
        self.y = call.y.double()
        self._ref = call.x.double() @ call.w.double().mT
        self._root = None if call.weights is None else call.weights.double().sqrt()[..., None]
        self._of_call = torch.stack((self._weighed(self._ref), self._weighed(self.y - self._ref)))

    def sums(self, recipe: Recipe, quantized: Quantized) -> torch.Tensor:
        """float64 [4, ...]: `OUTPUT_ENERGIES`."""
        qx, qw = quantized.pair(recipe, None, None)
        product = qx @ qw.mT
        of_recipe = (self._weighed(product - self._ref), self._weighed(self.y - product))
        return torch.cat((self._of_call, torch.stack(of_recipe)))

    def _weighed(self, t: torch.Tensor) -> torch.Tensor:
        return _energy(t if self._root is None else t * self._root)


def orders(call: Call) -> Iterator[Quantized]:
    """Both orders of quantizing and of rounding to y's dtype, where they can differ."""
    dtype = call.dtype
    yield Quantized(call.x, call.w, dtype)
    if any(torch.finfo(t.dtype).eps < torch.finfo(dtype).eps for t in (call.x, call.w)):
        yield Quantized(call.x.to(dtype), call.w.to(dtype), dtype)


class Quantized:
    """Quantized versions of x and W, each made once, of a few rows or of all."""

    def __init__(self, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> None:
        self._tensors = (x, w)
        self._dtype = dtype
        self._made: dict[tuple[int, str, int | None], torch.Tensor] = {}

    def pair(self, recipe: Recipe, rows: int | None, features: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [..., rows, K] and [..., features, K]; None for all."""
        return self._get(0, recipe[0], rows), self._get(1, recipe[1], features)

    def _get(self, side: int, name: str, limit: int | None) -> torch.Tensor:
        key = (side, name, limit)
        if key not in self._made:
            whole = self._tensors[side]
            if not Operand.parse(name).needs_whole_tensor:
                value = quantize(whole[..., :limit, :], name)
            elif whole.dim() == 2:
                value = quantize(whole, name)[:limit]
            else:
                value = torch.stack([quantize(each, name)[:limit] for each in whole])
            self._made[key] = value.to(self._dtype).double()
        return self._made[key]


def quantize(x: torch.Tensor, name: str) -> torch.Tensor:
    """x under one side of a recipe, blocks along the last axis. ValueError for an unknown name."""
    operand = Operand.parse(name)
    return x if operand.is_high_precision else quantize_operand(x, operand)


def recipe_words(recipe: Recipe) -> str:
    """Say a recipe in one name, or in one for x and one for W."""
    return recipe[0] if recipe[0] == recipe[1] else f"x {recipe[0]}, W {recipe[1]}"


def recipe_event(place: tuple[str, str], recipe: Recipe, before: Recipe) -> Event:
    """Return the event of a (module, phase) that has changed its recipe."""
    data = {"phase": place[1], "recipe": recipe_words(recipe), "before": recipe_words(before)}
    return Event("recipe", place[0], "changed", data)


def _energy(x: torch.Tensor) -> torch.Tensor:
    """||x||^2 over the finite elements of each matrix, [..., M, N] -> [...]."""
    finite = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if x.dim() == 2:
        return torch.dot(finite.flatten(), finite.flatten())
    return finite.square().sum((-2, -1))
