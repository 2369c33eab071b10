"""`mxprobe.emulate(model, recipe)`: fake quantization switched on, switched over and taken off again."""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxprobe.emulation.control import Control, unwatch_generation
from mxprobe.emulation.modules import Site, attention_site, install, is_installed, uninstall
from mxprobe.emulation.recipe import Recipe
from mxprobe.emulation.selection import attention_candidates, candidates, shared_with
from mxprobe.errors import UsageError

_EMULATION = "_mxprobe_emulation"
_FIRST_ATTENTION = 32_768
"""Attention modules are numbered from here, so that a recipe's choice of them renumbers no Linear."""
_ACTIVE: weakref.WeakSet[Emulation] = weakref.WeakSet()
"""Weak: the step hook must not keep a model alive."""
_STEP_HOOK: list[Any] = []


class Touched(NamedTuple):
    name: str
    class_name: str
    shape: tuple[int, ...]
    """Shape of the weight (the largest one in fused experts); empty for the products of attention."""
    note: str
    """What a user should know, e.g. a weight shared with a module that stays in high precision."""


class Skipped(NamedTuple):
    name: str
    class_name: str
    reason: str


class Change(NamedTuple):
    step: int
    """Optimizer steps seen since `emulate` when the recipe took effect."""
    recipe: Recipe


def emulate(model: nn.Module, recipe: Recipe | str, *, seed: int = 0, keep_weights: bool = True) -> Emulation:
    """Quantize-dequantize the GEMM operands of the model's Linears (and fused experts) as the recipe says.

    Works in place on instances: parameters, state_dict, classes and hooks stay as they are. `with emulate(...)`
    or `.remove()` takes it off. The rollout is what runs inside the model's `generate`, or, for a model without
    one, whatever runs without gradients.

    Args:
        model: any module, wrapped (DDP, FSDP2, PEFT, compiled) or not.
        recipe: a `Recipe` or what `Recipe.parse` reads.
        seed: of stochastic rounding; global generators are not touched.
        keep_weights: keep Q(W) during one call of `generate`, which costs the memory of the weights.

    Raises:
        UsageError: a recipe that cannot be read, a model emulated already, or one with nothing to emulate.
    """
    parsed = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    if any(_EMULATION in module.__dict__ or is_installed(module) for module in model.modules()):
        raise UsageError(
            "this model is emulated already",
            remedy="switch its recipe with Emulation.set(), or call Emulation.remove() first",
        )
    return Emulation(model, parsed, seed=seed, keep_weights=keep_weights)


def active() -> list[Emulation]:
    """Return the emulations of this process that have not been removed."""
    return [emulation for emulation in _ACTIVE if emulation.is_on]


def emulation_of(model: nn.Module) -> Any | None:
    """Return the emulation that a module of the model is under, also one of another copy of this package; or None."""
    for module in model.modules():
        if _EMULATION in module.__dict__:
            return module.__dict__[_EMULATION]
    return None


def count_steps() -> None:
    """Register the one hook that counts optimizer steps.

    Call it before emulating inside a step hook of your own, where torch iterates over the hooks and none may be added.
    """
    if not _STEP_HOOK:
        _STEP_HOOK.append(register_optimizer_step_post_hook(lambda *_: _after_step()))


def stop_counting() -> None:
    """Take that hook off if nothing is emulated; not inside a step hook."""
    if not active():
        while _STEP_HOOK:
            _STEP_HOOK.pop().remove()


class Emulation(AbstractContextManager["Emulation"]):
    """A model under emulation. Made by `emulate`; stays on until removed, also when nobody keeps this object."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, seed: int, keep_weights: bool) -> None:
        self.model = model
        self.is_on = True
        self.history: list[Change] = []
        """Recipes by the step at which they took effect, the first one included."""
        self._control = Control(recipe, seed=seed, keep_weights=keep_weights)
        self._pending: Recipe | None = None
        self._select(recipe)
        self._control.watch_generation(model)
        model.__dict__[_EMULATION] = self
        _ACTIVE.add(self)
        count_steps()

    @property
    def recipe(self) -> Recipe:
        return self._control.recipe

    @property
    def step(self) -> int:
        """Optimizer steps of this process since `emulate`."""
        return self._control.step

    def set(self, recipe: Recipe | str, *, now: bool = False) -> None:
        """Switch the recipe after the next optimizer step, from any thread; `now` in the training thread only.

        Raises:
            UsageError: a recipe that cannot be read or fits no module; the old one stays.
        """
        parsed = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
        if not self.is_on:
            raise UsageError("this emulation was removed", remedy="call mxprobe.emulate again")
        _check(self.model, parsed)
        if now:
            self._select(parsed)
        else:
            self._pending = parsed

    def rollout(self) -> AbstractContextManager[None]:
        """Mark a generation loop of your own as the rollout: `with emulation.rollout(): ...`"""
        return self._control.rollout()

    def remove(self) -> None:
        """Take it off: the model computes what it did before, bit for bit. A second call does nothing."""
        if not self.is_on:
            return
        self.is_on = False
        for module in self.model.modules():
            uninstall(module)
        unwatch_generation(self.model)
        self.model.__dict__.pop(_EMULATION, None)
        _ACTIVE.discard(self)
        stop_counting()

    def _end_step(self) -> None:
        self._control.step += 1
        pending, self._pending = self._pending, None
        if pending is not None:
            self._select(pending)

    def _select(self, recipe: Recipe) -> None:
        _check(self.model, recipe)
        touched: list[Touched] = []
        skipped: list[Skipped] = []
        products = attention_candidates(self.model, recipe)
        chosen = {id(candidate.module) for candidate in products if not candidate.reason}
        for module in self.model.modules():
            if id(module) not in chosen and attention_site(module) is not None:
                uninstall(module)
        for first, found in ((0, candidates(self.model, recipe)), (_FIRST_ATTENTION, products)):
            for ordinal, (name, module, reason) in enumerate(found, start=first):
                if reason:
                    uninstall(module)
                    skipped.append(Skipped(name, type(module).__name__, reason))
                    continue
                if not is_installed(module):
                    install(module, Site(self._control, ordinal, module, is_attention=found is products))
                touched.append(self._touched(name, module, is_attention=found is products))
        self.touched = tuple(touched)
        self.skipped = tuple(skipped)
        self._control.switch(recipe)
        self.history.append(Change(self._control.step, recipe))

    def _touched(self, name: str, module: nn.Module, *, is_attention: bool) -> Touched:
        if is_attention:
            return Touched(name, type(module).__name__, (), "its products q k^T and p v")
        shared = shared_with(self.model, module)
        note = f"weight shared with {', '.join(shared)}, which reads it unquantized" if shared else ""
        return Touched(name, type(module).__name__, _weight_shape(module), note)

    def products_seen(self) -> dict[str, int]:
        """Return by attention module how many calls multiplied q by k, p by v, or both, outside torch.compile.

        A module that has run and is at 0 multiplies in a way that is not intercepted.
        """
        sites = ((name, attention_site(module)) for name, module in self.model.named_modules())
        return {name: site.n_products for name, site in sites if site is not None}

    def report(self) -> str:
        """Return what is emulated and what is not, one line per module."""
        lines, counts = [str(self)], self.products_seen()
        for t in self.touched:
            shape, note = f" {list(t.shape)}" if t.shape else "", f"  ({t.note})" if t.note else ""
            seen = f", {counts[t.name]} calls so far" if t.name in counts else ""
            lines.append(f"  emulated  {t.name} {t.class_name}{shape}{note}{seen}")
        lines += [f"  left out  {s.name} {s.class_name}: {s.reason}" for s in self.skipped]
        return "\n".join(lines)

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Emulation:
        return self

    def __str__(self) -> str:
        state = "" if self.is_on else " (removed)"
        return f"{self.recipe} · {len(self.touched)} modules emulated, {len(self.skipped)} left out{state}"

    def __repr__(self) -> str:
        return f"<Emulation {self}>"


def _after_step() -> None:
    for emulation in active():
        emulation._end_step()  # pyright: ignore[reportPrivateUsage]


def _check(model: nn.Module, recipe: Recipe) -> None:
    found = candidates(model, recipe)
    if found and any(not candidate.reason for candidate in found):
        return
    reasons = sorted({candidate.reason for candidate in found}) or ["it has no nn.Linear and no fused experts"]
    raise UsageError(
        f"the recipe {str(recipe)!r} applies to no module of {type(model).__name__}",
        cause="; ".join(reasons[:5]),
        remedy="widen include, narrow exclude, or lower keep_first and keep_last",
    )


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, nn.Linear):  # a parametrized one has no parameter of its own
        return (module.out_features, module.in_features)
    return max((tuple(p.shape) for p in module.parameters(recurse=False)), key=math.prod)
