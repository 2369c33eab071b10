"""Which modules a recipe applies to, and for each one left out, why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.emulation.recipe import Recipe

SITE = "_mxprobe_site"
INNER_FORWARD = "_mxprobe_inner_forward"
"""Instance attributes of an emulated module: what its forward needs, and the instance's own forward before ours."""

_BLOCK = re.compile(r"^(?P<stack>(?:.*\.)?(?:layers|layer|h|blocks))\.(?P<index>\d+)\.")
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Candidate(NamedTuple):
    """A module that multiplies by weights: a Linear, or a container of fused 3-D expert weights."""

    name: str
    module: nn.Module
    reason: str
    """Why it is left out; empty when the recipe applies."""


def candidates(model: nn.Module, recipe: Recipe) -> list[Candidate]:
    """Return every such module in order of `named_modules`, selected or with its reason."""
    found = [(name, module) for name, module in model.named_modules() if _multiplies(module)]
    return _judged(model, recipe, [Candidate(*each, _not_emulable(*each, model)) for each in found])


def attention_candidates(model: nn.Module, recipe: Recipe) -> list[Candidate]:
    """Return the modules that multiply q by k and p by v, selected or with a reason; none if the recipe leaves them.

    A module is one by its name: a class `...Attention` none of whose children is one.
    """
    if not recipe.attention:
        return []
    found = [
        Candidate(name, module, _attention_obstacle(module))
        for name, module in model.named_modules()
        if _is_attention(module) and sum(map(_is_attention, module.modules())) == 1
    ]
    return _judged(model, recipe, found)


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether the module holds the weights of all experts in 3-D parameters."""
    return "Experts" in type(module).__name__ and any(p.dim() == 3 for p in module.parameters(recurse=False))


def own_forward(module: nn.Module) -> bool:
    """Return whether the module's class, or an earlier patch of the instance, is no nn.Linear's."""
    return inner_forward(module) is not nn.Linear.forward


def inner_forward(module: nn.Module) -> Any:
    """Return the forward below ours: the instance's where something patched it (a bound method), else the class's."""
    if SITE in module.__dict__:
        return module.__dict__.get(INNER_FORWARD, type(module).forward)
    return module.__dict__.get("forward", type(module).forward)


def shared_with(model: nn.Module, module: nn.Module) -> list[str]:
    """Return the names of other modules that hold this module's parameters, e.g. an embedding tied to a head."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    return [
        name
        for name, other in model.named_modules()
        if other is not module and any(id(parameter) in own for parameter in other.parameters(recurse=False))
    ]


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _attention_obstacle(module: nn.Module) -> str:
    """Return why its products cannot be reached; transformers' modules say which implementation they use."""
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies inside one function of torch"
    how = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if how not in (None, "sdpa", "eager"):
        return f"attention implementation {how!r} multiplies inside a fused kernel; load the model with 'sdpa'"
    return ""


def _multiplies(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_fused_experts(module)


def _not_emulable(name: str, module: nn.Module, model: nn.Module) -> str:
    weights = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
    if any(p.dtype not in _FLOATING for p in weights):
        return f"its weight is stored as {weights[0].dtype}: quantized already"
    parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if isinstance(module, nn.Linear) and not own_forward(module):
        return ""
    if not _calls_linear(module):
        return f"{type(module).__name__}.forward does not multiply with F.linear"
    return ""


def _calls_linear(module: nn.Module) -> bool:
    """Return whether the Python code of the forward names `linear`, or defers to the parent class."""
    forward = inner_forward(module)
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and bool({"linear", "super"} & {*code.co_names, *code.co_freevars})


def _judged(model: nn.Module, recipe: Recipe, found: list[Candidate]) -> list[Candidate]:
    """Return the candidates, with the reason why the recipe leaves one out where none was known."""
    blocks = _block_counts(name for name, _ in model.named_modules())
    return [each._replace(reason=each.reason or _not_selected(each.name, recipe, blocks)) for each in found]


def _not_selected(name: str, recipe: Recipe, blocks: dict[str, int]) -> str:
    if not any(fnmatchcase(name, glob) for glob in recipe.include):
        return f"not in include ({', '.join(recipe.include)})"
    for glob in recipe.exclude:
        if fnmatchcase(name, glob):
            return f"excluded by {glob}"
    match = _BLOCK.match(name)
    if match:
        index, n_blocks = int(match["index"]), blocks[match["stack"]]
        if index < recipe.keep_first:
            return f"one of the first {recipe.keep_first} blocks"
        if index >= n_blocks - recipe.keep_last:
            return f"one of the last {recipe.keep_last} blocks"
    return ""


def _block_counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        if match := _BLOCK.match(f"{name}."):
            counts[match["stack"]] = max(counts.get(match["stack"], 0), int(match["index"]) + 1)
    return counts
