"""What each expert really did: its output against its own exact product, and which expert does something else.

    ref_e = x_e W_e^T      realised, predicted and residual as in `mxprobe.measuring.recipes`, summed over the experts

One recipe is looked for per layer. An expert that it does not explain is looked at alone: another recipe, the weight of
another expert, the transpose of its own, or nothing that is known. That is told once, in an event of kind `experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mxprobe.events import EXPERTS, Event
from mxprobe.measuring.operands.stack import Stack
from mxprobe.measuring.recipes import (
    EXACT_FRAC,
    OUTPUT_ENERGIES,
    RULES,
    Call,
    Recipe,
    infer_recipe,
    output_energies,
    quantize,
    recipe_words,
)
from mxprobe_kernels.recipe_grammar import NONE

EXPLAINED_AT_MOST = 8
"""Experts looked at alone in one step."""
_LEADERS = 3
"""Experts asked for the layer's recipe, until one is exact."""


class LayerOutput(NamedTuple):
    """The recipe of a layer and how far its output is from it."""

    recipe: Recipe
    is_known: bool
    """The recipe is exact for a Linear, or for one of the experts."""
    sums: dict[str, Any]
    """`exact` (of all experts) and `OUTPUT_ENERGIES`."""
    odd: list[int]
    """Matrices of the stack that a known recipe does not explain."""


def layer_output(stack: Stack, previous: Recipe | None) -> LayerOutput:
    """Find the recipe of a stack's output; `previous` is the last one that was exact."""
    recipe, sums = _recipe(stack, previous)
    if stack.experts is None:
        return LayerOutput(recipe, sums["exact"], sums, [])
    assert stack.y is not None  # only outputs that are visible are judged
    each = output_energies(Call(stack.x.rows, stack.w_rows, stack.y, stack.y_dtype, stack.there), recipe)
    fits = (each[3] <= EXACT_FRAC * each[0]).tolist()
    is_known = sums["exact"]
    total = dict(zip(OUTPUT_ENERGIES, each.sum(1).tolist()))
    odd = [i for i, fit in enumerate(fits) if not fit] if is_known else []
    return LayerOutput(recipe, is_known, {"exact": is_known and all(fits), **total}, odd)


def _recipe(stack: Stack, previous: Recipe | None) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of the experts with most tokens, the first that is exact, and the sums of the one it was found on."""
    leaders = [0]
    if stack.there is not None:
        measured = stack.there.sum(1).tolist()
        leaders = sorted(range(len(measured)), key=lambda i: -measured[i])[:_LEADERS]
    found = infer_recipe(stack.call(leaders[0]), previous)
    for i in leaders[1:]:
        if found[1]["exact"]:
            break
        other = infer_recipe(stack.call(i), previous)
        found = other if other[1]["exact"] else found
    return found


def explained(stack: Stack, odd: list[int], layer: Recipe, place: tuple[str, str]) -> Iterator[tuple[int, Event]]:
    """Yield (expert, event) of the matrices that the layer's recipe does not explain, up to EXPLAINED_AT_MOST.

    place: module and phase.
    """
    numbers = [] if stack.experts is None else stack.experts.numbers
    for i in odd[:EXPLAINED_AT_MOST]:
        state, about = _explain(stack, numbers, i, layer)
        where = {"phase": place[1], "expert": numbers[i], "layer_recipe": recipe_words(layer)}
        yield numbers[i], Event(EXPERTS, place[0], state, {**where, **about})


def _explain(stack: Stack, numbers: list[int], i: int, layer: Recipe) -> tuple[str, dict[str, Any]]:
    """Return what an expert computes that the layer's recipe does not explain: a state of `experts`, and its data."""
    call = stack.call(i)
    recipe, sums = infer_recipe(call)
    if sums["exact"]:
        return "other_recipe", {"recipe": recipe_words(recipe)}
    y = call.y.double()
    for x_name, w_name in dict.fromkeys((layer, (NONE, NONE), *((rule, rule) for rule in RULES))):
        x = quantize(call.x, x_name).to(stack.y_dtype).double()
        for j, expert in enumerate(numbers):
            if j != i and _matches(y, x, quantize(stack.w_rows[j], w_name), stack.y_dtype):
                return "other_expert", {"other": expert}
        if stack.out_index is None:
            for how, w in _relaid(call.w):
                if _matches(y, x, quantize(w, w_name), stack.y_dtype):
                    return how, {}
    share = float(sums["residual2"]) / max(float(sums["ref2"]), torch.finfo(torch.float64).tiny)
    return "unknown", {"residual_frac": share}


def _relaid(w: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield W [O, K] as an engine makes it that reads its layout otherwise, with the state that this is."""
    out_features, in_features = w.shape
    if out_features == in_features:
        yield "transposed", w.T.contiguous()
    else:
        yield "read_transposed", w.reshape(in_features, out_features).T.contiguous()
        yield "stored_transposed", w.T.reshape(out_features, in_features)
    half = out_features // 2
    if out_features % 2 == 0:
        yield "halves_exchanged", torch.cat((w[half:], w[:half]))
        yield "rows_interleaved", torch.stack((w[:half], w[half:]), 1).reshape(w.shape)
        yield "rows_as_halves", torch.cat((w[::2], w[1::2]))


def _matches(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> bool:
    difference = y - x @ w.to(dtype).double().T
    return float(difference.square().sum()) <= EXACT_FRAC * float(y.square().sum())
