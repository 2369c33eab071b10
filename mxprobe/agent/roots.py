"""Finds the model by watching one optimizer step; no heap scan, and no attribute of a foreign object is probed.

A root is a module whose forward was entered from outside any other module. The trained roots are those entered
with gradient enabled whose parameters the stepping optimizer owns.
"""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any, Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mxprobe.measuring.adapters.families import adapter_of
from mxprobe.measuring.adapters.layer_numbers import note_stage
from mxprobe.measuring.adapters.main_parameters import is_stepped_by
from mxprobe.measuring.compat import caller_frame
from mxprobe.measuring.engines.layouts import HeldWeight, weights_of

_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


class RootWatch:
    """Global forward hooks that note outermost modules. `close` takes them off, from any thread."""

    def __init__(self, swallow: Callable[[str, BaseException], None]) -> None:
        """`swallow` takes what goes wrong in a hook, and raises what is the user's."""
        self._swallow = swallow
        self.on_enter: Callable[[nn.Module], None] | None = None
        """Called with each outermost module as its forward begins, in the thread that runs it."""
        self.with_grad: dict[int, nn.Module] = {}
        self.without_grad: dict[int, nn.Module] = {}
        self.began_inside = False
        """A forward pass ended that had begun before: what it entered since looks like roots and is none."""
        self._local = threading.local()
        _silence()
        self._handles: list[Any] = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0:
            seen = self.with_grad if torch.is_grad_enabled() else self.without_grad
            seen[id(module)] = module
            try:
                note_stage(module, caller_frame())
            except Exception as error:
                self._swallow("looking for a pipeline stage", error)
            if self.on_enter is not None:
                self.on_enter(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        depth = getattr(self._local, "depth", 0)
        self.began_inside |= depth == 0
        self._local.depth = max(depth - 1, 0)

    def forget(self) -> None:
        """Start over, at a step boundary: what was seen so far may have begun in the middle of a forward."""
        self.with_grad = {}
        self.without_grad = {}
        self.began_inside = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        _speak()

    def describe(self) -> str:
        """Say in words what was seen."""
        parts = [
            f"{len(seen)} {how} ({', '.join(sorted({type(m).__name__ for m in seen.values()})[:5])})"
            for how, seen in (
                ("entered with gradient", self.with_grad),
                ("entered without gradient", self.without_grad),
            )
            if seen
        ]
        return "; ".join(parts) if parts else "no forward pass of any module"


def _silence() -> None:
    """Silence torch's warning of our global hooks on a compiled module, an error to some, until `_speak`."""
    if "torch._dynamo" in sys.modules:
        warnings.filterwarnings("ignore", _GLOBAL_HOOKS)


def _speak() -> None:
    for entry in list(warnings.filters):
        if getattr(entry[1], "pattern", None) == _GLOBAL_HOOKS and entry in warnings.filters:
            warnings.filters.remove(entry)  # pyright: ignore[reportAttributeAccessIssue]


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not inside another one of the list."""
    inner = {id(m) for root in modules for m in root.modules() if m is not root}
    return [m for m in modules if id(m) not in inner]


def trained_roots(seen: list[nn.Module], optimizer: torch.optim.Optimizer) -> tuple[list[nn.Module], bool]:
    """Return the roots among `seen` that the optimizer trains, and whether they hold all that it trains.

    They do not when the watch began in the middle of a forward and saw inner modules as roots.
    """
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    roots = outermost([m for m in seen if any(is_stepped_by(p, owned) for p in m.parameters())])
    parameters = [p for root in roots for p in root.parameters()]
    held = {id(p) for p in parameters} | {id(getattr(p, "main_param", None)) for p in parameters}
    return roots, owned <= held


def holds_a_gemm(root: nn.Module) -> bool:
    """Whether there is something to measure: a GEMM that an adapter knows, or an engine's weight to be compared."""
    return any(adapter_of(m) is not None for m in root.modules()) or any(
        isinstance(each, HeldWeight) for each in weights_of(root)
    )
