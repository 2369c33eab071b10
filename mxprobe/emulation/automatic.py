"""`mxprobe run --emulate RECIPE`: a model is emulated when an optimizer is given its parameters, so before its first
training step, and in a trainer that builds its optimizer first, before its first forward and its first `generate`.

A model is the outermost module that holds a parameter of the optimizer's. Modules are noted as they are built, by
torch's own registration hooks; one that was copied or unpickled is met at its first forward instead.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mxprobe.emulation.api import emulate, emulation_of
from mxprobe.emulation.recipe import Recipe
from mxprobe.errors import UsageError

_MAX_LISTED = 60
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


class AutomaticEmulation:
    """Emulates each model once it is given to an optimizer, and says on stderr what it did, once for each model.

    `start` puts it in, before any module is built.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._waiting: set[int] = set()
        """ids of parameters of optimizers that belong to no module known so far."""
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._forward_hook: Any = None

    def start(self) -> None:
        register_module_module_registration_hook(self._note)
        register_module_parameter_registration_hook(self._note)
        add_param_group = torch.optim.Optimizer.add_param_group

        @wraps(add_param_group)
        def noticed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            add_param_group(optimizer, *args, **kwargs)
            try:
                self._on_group(optimizer.param_groups[-1])
            except Exception as error:
                _say(f"not emulated: {error}")

        optimizers: Any = torch.optim.Optimizer
        optimizers.add_param_group = noticed

    def _note(self, module: nn.Module, name: str, registered: Any) -> None:
        self._modules.add(module)

    def _on_group(self, group: dict[str, Any]) -> None:
        owned = {id(p) for p in group["params"]}
        models = outermost_holders(list(self._modules), owned)
        for model in models:
            self._emulate(model)
        owned -= {id(p) for model in models for p in model.parameters()}
        if owned:
            self._waiting |= owned
            if self._forward_hook is None:
                self._forward_hook = register_module_forward_pre_hook(self._on_forward)

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        """Runs before any forward while the model of a parameter is unknown. The first module met is the outermost."""
        if torch.compiler.is_compiling():
            return
        try:
            own = {id(p) for p in module.parameters()}
            if not own & self._waiting:
                return
            self._waiting -= own
            self._emulate(module)
            if not self._waiting:
                self._forward_hook.remove()
                self._forward_hook = None
        except Exception as error:
            _say(f"not emulated: {error}")

    def _emulate(self, model: nn.Module) -> None:
        model = unwrapped(model)
        if model in self._refused or emulation_of(model) is not None:
            return
        try:
            emulation = emulate(model, self.recipe)
        except UsageError as error:
            self._refused.add(model)
            _say(f"{type(model).__name__} is not emulated: {error}")
            return
        lines = [f"{type(model).__name__} is emulated: {emulation}"]
        lines += [f"  left out  {s.name} {s.class_name}: {s.reason}" for s in emulation.skipped[:_MAX_LISTED]]
        if len(emulation.skipped) > _MAX_LISTED:
            lines.append(f"  left out  {len(emulation.skipped) - _MAX_LISTED} more")
        lines += [f"  emulated  {t.name} {t.class_name}  ({t.note})" for t in emulation.touched if t.note][:_MAX_LISTED]
        _say("\n".join(lines))


def start(line: str) -> None:
    """Emulate, under the recipe of that line, every model that this process will train. UsageError for the line."""
    AutomaticEmulation(Recipe.parse(line)).start()


def outermost_holders(modules: list[nn.Module], owned: set[int]) -> list[nn.Module]:
    """Return the modules that hold a parameter of those ids and are inside no other that does."""
    holding = [m for m in modules if any(id(p) in owned for p in m.parameters())]
    inner = {id(child) for module in holding for child in module.modules() if child is not module}
    return [module for module in holding if id(module) not in inner]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, FSDP and torch.compile: what a script would have given to `emulate`."""
    while type(model).__name__ in _WRAPPERS:
        inner = model._modules.get(_WRAPPERS[type(model).__name__])  # pyright: ignore[reportPrivateUsage]
        if inner is None:
            break
        model = inner
    return model


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"mxprobe: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)
