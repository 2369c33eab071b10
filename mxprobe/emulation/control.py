"""What all emulated modules of one model share: the plan, the side it is for, the step, weights kept in generation."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from mxprobe.emulation.linear import Plan
from mxprobe.emulation.recipe import Recipe, Side

_GENERATORS = ("generate", "generate_batch")
_CONTROL = "_mxprobe_control"
_ANNOUNCES = "_mxprobe_announces"


class Control:
    """State that every forward reads and that changes at step boundaries. Copies of the model share it."""

    def __init__(self, recipe: Recipe, *, seed: int, keep_weights: bool) -> None:
        self.seed = seed
        self.keep_weights = keep_weights
        self.step = 0
        self.has_generate = False
        self._generating = 0
        self._quantized_weights: dict[int, torch.Tensor] | None = None
        self.switch(recipe)

    def switch(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.plan = None if recipe.quantizes_nothing else Plan.of(recipe)
        self.is_random = any(operand.stochastic for operand in recipe.operands.values())

    def plan_now(self) -> Plan | None:
        """Return the plan where the recipe's side is running, else None."""
        if self.plan is None or self.recipe.side is Side.BOTH:
            return self.plan
        in_rollout = self._generating > 0 if self.has_generate else not torch.is_grad_enabled()
        return self.plan if in_rollout == (self.recipe.side is Side.ROLLOUT) else None

    def salt(self, ordinal: int) -> int:
        """Return a number for each (seed, step, module), with room for its operands; 0 where nothing is random."""
        return 16 * (ordinal + 65_536 * ((self.seed * 7_919 + self.step) % 2**28)) if self.is_random else 0

    @contextmanager
    def rollout(self) -> Generator[None]:
        """Make the model the rollout while inside. Weights do not change meanwhile, so each is quantized once."""
        outermost = self._generating == 0
        if outermost and self.keep_weights:
            self._quantized_weights = {}
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            if outermost:
                self._quantized_weights = None

    def kept_weight(self, ordinal: int, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return Q(W) of a module during a rollout without gradients; None where it must be quantized afresh."""
        if self._quantized_weights is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if ordinal not in self._quantized_weights:
            self._quantized_weights[ordinal] = make()
        return self._quantized_weights[ordinal]

    def watch_generation(self, model: nn.Module) -> None:
        """Let every `generate` of the model and its submodules say that it runs."""
        for module in model.modules():
            for name in _GENERATORS:
                if callable(getattr(type(module), name, None)):
                    self.has_generate = True
                    module.__dict__[_CONTROL] = self
                    if f"{_ANNOUNCES}_{name}" in module.__dict__:
                        continue  # left underneath somebody's wrapper by an earlier emulation
                    if name in module.__dict__:
                        module.__dict__[f"_mxprobe_{name}"] = module.__dict__[name]
                    module.__dict__[name] = MethodType(_announcing(type(module), name), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        return self


def unwatch_generation(model: nn.Module) -> None:
    for module in model.modules():
        if module.__dict__.pop(_CONTROL, None) is None:
            continue
        for name in _GENERATORS:
            if name not in module.__dict__:
                continue
            # Of the function below the method: functools.wraps copies the mark to what wraps the method.
            if not getattr(getattr(module.__dict__[name], "__func__", None), _ANNOUNCES, False):
                # Somebody has wrapped it since: ours stays underneath and passes through.
                module.__dict__[f"{_ANNOUNCES}_{name}"] = True
                continue
            del module.__dict__[name]
            if f"_mxprobe_{name}" in module.__dict__:
                module.__dict__[name] = module.__dict__.pop(f"_mxprobe_{name}")


def _announcing(owner: type[nn.Module], name: str) -> Callable[..., Any]:
    original: Any = getattr(owner, name)

    # A method, not a closure over the module: a deep copy of the model then generates with the copy.
    @wraps(original)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self.__dict__.get(f"_mxprobe_{name}") or MethodType(original, self)
        control: Control | None = self.__dict__.get(_CONTROL)
        with control.rollout() if control is not None else nullcontext():
            return inner(*args, **kwargs)

    setattr(generate, _ANNOUNCES, True)
    return generate
