"""What each expert really did: its output against its own exact product, and which expert does something else.

    ref_e = x_e W_e^T      realised, predicted and residual as in `mxprobe.measuring.recipes`, summed over the experts

One recipe is looked for per layer. An expert that it does not explain is looked at alone: another recipe, the weight of
another expert, the transpose of its own, or nothing that is known. That is told once, in an event of kind `experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mxprobe.events import EXPERTS, Event
from mxprobe.measuring.moe.stack import Stack
from mxprobe.measuring.recipes import (
    EXACT_FRAC,
    RULES,
    Call,
    Recipe,
    infer_recipe,
    quantize,
    recipe_event,
    recipe_words,
)
from mxprobe.schema import Row
from mxprobe_kernels.recipe_grammar import NONE, Operand

EXPLAINED_AT_MOST = 8
"""Experts looked at alone in one step."""
_LEADERS = 3
"""Experts asked for the layer's recipe, until one is exact."""


class OutputState:
    """Of each (module, phase): the recipe last found exact, and what was told of single experts. The worker's own."""

    def __init__(self) -> None:
        self.recipes: dict[tuple[str, str], Recipe] = {}
        self.told: dict[tuple[str, str, int], Event] = {}


def output_rows(when: Row, held: Stack, state: OutputState) -> Iterator[tuple[str, Row]]:
    """A row of table `outputs` for the experts measured, and an event for each that behaves unlike the others."""
    place = (when["module"], when["phase"])
    before = state.recipes.get(place)
    recipe, exact = _layer_recipe(held, before)
    sums = _sums(held, recipe)
    fits = (sums[3] <= EXACT_FRAC * sums[0]).tolist()
    ref2, realised2, predicted2, residual2 = sums.sum(1).tolist()
    if exact:
        state.recipes[place] = recipe
    how = {"recipe_x": recipe[0], "recipe_w": recipe[1], "exact": exact and all(fits)}
    counted = {"sampled_frac": held.sampled_frac, "n_rows": held.n_rows}
    energies = {"ref2": ref2, "realised2": realised2, "predicted2": predicted2, "residual2": residual2}
    lag = 0 if how["exact"] else None
    yield "outputs", {**when, **how, **counted, **energies, "weight_lag": lag}
    if exact and before is not None and before != recipe:
        yield "events", recipe_event(place, recipe, before).at(when)
    odd = [i for i, each in enumerate(fits) if not each] if exact else []
    for i in odd[:EXPLAINED_AT_MOST]:
        what, about = _explain(held, i, recipe)
        where = {"phase": place[1], "expert": held.experts[i], "layer_recipe": recipe_words(recipe)}
        event, key = Event(EXPERTS, place[0], what, {**where, **about}), (*place, held.experts[i])
        if state.told.get(key) != event:
            state.told[key] = event
            yield "events", event.at(when)


def _layer_recipe(held: Stack, previous: Recipe | None) -> tuple[Recipe, bool]:
    """The recipe of the experts with most tokens, and whether it is exact for one of them."""
    measured = held.there.sum(1).tolist()
    leaders = sorted(range(len(measured)), key=lambda i: -measured[i])[:_LEADERS]
    first: Recipe | None = None
    for i in leaders:
        recipe, sums = infer_recipe(_call(held, i), previous)
        if sums["exact"]:
            return recipe, True
        first = first or recipe
    assert first is not None  # there is an expert
    return first, False


def _call(held: Stack, i: int) -> Call:
    there = held.there[i]
    return Call(held.x[i][there], held.weight_rows[i], held.y[i][there], held.dtype)


def _sums(held: Stack, recipe: Recipe) -> torch.Tensor:
    """float64 [4, E]: ref2, realised2, predicted2, residual2 of each expert; of the orders of rounding, the better."""
    x, w, y = held.x.double(), held.weight_rows.double(), held.y.double()
    ref = x @ w.mT
    tried: list[torch.Tensor] = []
    for cast in (False, True):
        qx, qw = (
            _quantized(t, name, held.dtype, cast=cast)
            for t, name in ((held.x, recipe[0]), (held.weight_rows, recipe[1]))
        )
        product = qx @ qw.mT
        tried.append(
            torch.stack([_energy(each * held.there[..., None]) for each in (ref, y - ref, product - ref, y - product)])
        )
    return torch.where(tried[1][3] < tried[0][3], tried[1], tried[0])


def _quantized(t: torch.Tensor, name: str, dtype: torch.dtype, *, cast: bool) -> torch.Tensor:
    """float64, shaped like t [E, M, K], each expert's matrix a tensor of its own; `cast`: rounded to dtype before."""
    t = t.to(dtype) if cast else t
    if Operand.parse(name).needs_whole_tensor:
        return torch.stack([quantize(each, name) for each in t]).to(dtype).double()
    return quantize(t.reshape(-1, t.shape[-1]), name).reshape(t.shape).to(dtype).double()


def _energy(t: torch.Tensor) -> torch.Tensor:
    """[E, M, N] -> [E], over the finite elements."""
    return t.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum((1, 2))


def _explain(held: Stack, i: int, layer: Recipe) -> tuple[str, dict[str, Any]]:
    """Return what an expert computes that the layer's recipe does not explain: a state of `experts`, and its data."""
    call = _call(held, i)
    recipe, sums = infer_recipe(call)
    if sums["exact"]:
        return "other_recipe", {"recipe": recipe_words(recipe)}
    y = call.y.double()
    for x_name, w_name in dict.fromkeys((layer, (NONE, NONE), *((rule, rule) for rule in RULES))):
        x = quantize(call.x, x_name).to(held.dtype).double()
        for j, expert in enumerate(held.experts):
            if j != i and _matches(y, x, quantize(held.weight_rows[j], w_name), held.dtype):
                return "other_expert", {"other": expert}
        if held.out_index is None:
            for how, w in _relaid(call.w):
                if _matches(y, x, quantize(w, w_name), held.dtype):
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
