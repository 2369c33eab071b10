"""Forward hooks of a tap: known from attach, in the modules only for a probed step."""

from __future__ import annotations

import weakref
from typing import Any, Callable

from torch import nn

Hook = Callable[[nn.Module, Any, Any], None]
Guarded = Callable[[Callable[[Any, Any], None]], Hook]
"""Makes a hook of a function of input and output."""


class ForwardHooks:
    """Pairs of a module and its hook; the modules are not kept alive."""

    def __init__(self) -> None:
        self._hooks: list[tuple[weakref.ref[nn.Module], Hook]] = []
        self._handles: list[Any] = []

    def add(self, module: nn.Module, hook: Hook) -> None:
        self._hooks.append((weakref.ref(module), hook))

    def arm(self) -> None:
        """Hooks in, for the step that begins."""
        self.remove()
        modules = [(reference(), hook) for reference, hook in self._hooks]
        self._handles = [module.register_forward_hook(hook) for module, hook in modules if module is not None]

    def remove(self) -> None:
        """Hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
