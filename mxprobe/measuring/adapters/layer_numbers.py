"""Which layer of the whole model a module is, wherever pipeline and expert parallelism have put it.

Every pipeline stage calls its first layer `layers.0` and every expert rank its first expert `experts.0`. What tells
them apart is what the modules themselves carry:

    layer_number           Megatron-Core 0.16.1, from 1, over all stages
    layer_idx, layer_id    transformers 5.24 (in the attention), torchtitan: from 0
    local_expert_indices   Megatron-Core's MoELayer: which experts this rank holds
    stage_index            torch.distributed.pipelining: of the stage that calls the model

An index in a name becomes the one of the whole model. A stage whose model numbers no layer has all its names begin with
`stage<i>.`: equal names are equal layers, or no such name is given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mxprobe.measuring.adapters.adapter import held
from mxprobe.measuring.compat import frames_from

_PIPELINING = "torch.distributed.pipelining"
_MAX_FRAMES = 12
_NUMBERS = (("layer_number", 1), ("layer_idx", 0), ("layer_id", 0))


@dataclass(frozen=True)
class Stage:
    index: int
    count: int


_stages: WeakKeyDictionary[nn.Module, Stage] = WeakKeyDictionary()


def note_stage(root: nn.Module, frame: FrameType | None) -> None:
    """Remember which pipeline stage has just called the model, as its caller's frames say."""
    if _PIPELINING not in sys.modules or root in _stages:
        return
    for above in islice(frames_from(frame), _MAX_FRAMES):
        if above.f_globals.get("__name__", "").startswith(_PIPELINING):
            stage: Any = above.f_locals.get("self")
            held_by = vars(stage) if hasattr(type(stage), "forward_one_chunk") else {}
            if held_by.get("submod") is root:
                _stages[root] = Stage(int(held_by["stage_index"]), int(held_by["num_stages"]))
                return


class Identity:
    """Names below one root -> names in the whole model."""

    def __init__(self, root: nn.Module) -> None:
        self._indices: dict[str, dict[str, int]] = {}
        """Path of a list of layers or experts -> local index -> index in the whole model."""
        modules = dict(root.named_modules())
        self.numbered = False
        """Some list of layers says which of the model's they are."""
        for path, module in modules.items():
            children = {name: child for name, child in module.named_children() if name.isdigit()}
            experts = _expert_indices(path, modules, len(children))
            found = experts if experts is not None else _layer_numbers(children)
            if children and found is not None:
                self._indices[path] = found
                self.numbered = self.numbered or experts is None
        stage = _stages.get(root)
        self._prefix = f"stage{stage.index}" if stage is not None and stage.count > 1 and not self.numbered else ""

    def __call__(self, name: str) -> str:
        """Return the name in the whole model of the module that `root.named_modules()` calls `name`."""
        parts, named = name.split(".") if name else [], []
        for i, part in enumerate(parts):
            index = self._indices.get(".".join(parts[:i]), {}).get(part)
            named.append(part if index is None else str(index))
        return ".".join(([self._prefix] if self._prefix else []) + named)


def _layer_numbers(children: Mapping[str, nn.Module]) -> dict[str, int] | None:
    """Return local name -> index in the whole model, where every child says so and no two say the same."""
    found: dict[str, int] = {}
    for name, child in children.items():
        number = next(_numbers_in(child), None)
        if number is None:
            return None
        found[name] = number
    return found if len(set(found.values())) == len(found) else None


def _numbers_in(block: nn.Module) -> Iterator[int]:
    for module in (block, *block.children()):
        for attribute, first in _NUMBERS:
            number = held(module, attribute)
            if isinstance(number, int) and not isinstance(number, bool) and number >= first:
                yield number - first


def _expert_indices(path: str, modules: Mapping[str, nn.Module], n: int) -> dict[str, int] | None:
    """Return the indices of a list of experts, by what the module around it says; None for any other list."""
    above = path
    while n and above:
        above = above.rpartition(".")[0]
        indices = held(modules[above], "local_expert_indices")
        if isinstance(indices, (list, tuple)) and len(indices) == n:
            return {str(i): int(index) for i, index in enumerate(indices)}
    return None
