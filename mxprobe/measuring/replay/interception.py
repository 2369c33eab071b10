"""Every Linear's product computed by a function of ours while a call is replayed.

A forward hook of ours, before all others, replaces the output. Quantized subclasses and emulated forwards are then
replayed in high precision too, and an arm can put any error in. The gradient is taken at the replaced output, at the
graph edge as it was before anything in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.measuring.compat import in_backward, version_of
from mxprobe.measuring.isolation import is_plain

Product = Callable[[str, nn.Linear, torch.Tensor], torch.Tensor]
"""(name, module, x [..., K]) -> y [..., O], bias included."""
MAX_OUTPUT_BYTES = 1 << 31
"""Outputs of the Linears whose gradients are held at once; the others are for another replay."""


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module], on_call: Callable[[str, Any, tuple[Any, ...], Any], Any], *, prepend: bool = False
) -> Generator[None]:
    """Call `on_call(name, module, args, output)` after each forward of the modules; what it returns is the output."""
    handles = [
        module.register_forward_hook(partial(on_call, name), prepend=prepend) for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def exact_product(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return x W^T + b in the precision that the run calls high: its dtypes, its autocast."""
    return F.linear(x, module.weight, module.bias)


class Recorded:
    """One call of one Linear: its input, and the graph edge at which its output's gradient can be had."""

    def __init__(self, name: str, module: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> None:
        self.name = name
        self.module = module
        self.edge = torch.autograd.graph.get_gradient_edge(y)
        self._x = x.detach()
        self._version = version_of(x)

    @property
    def x(self) -> torch.Tensor | None:
        """Return [..., K], or None where it was changed in place since."""
        return self._x if version_of(self._x) == self._version else None


class Recordings:
    """Calls kept of the modules named in `names`, as many as `max_bytes` of their outputs allow."""

    def __init__(self, names: Collection[str], max_bytes: int) -> None:
        self.calls: list[Recorded] = []
        self.skipped: set[str] = set()
        """Modules whose outputs did not fit; none of their calls is kept."""
        self.unreached: set[str] = set()
        """Modules that were called without gradient."""
        self._names = set(names)
        self._left = max_bytes

    def add(self, name: str, module: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> None:
        if name not in self._names or in_backward():
            return
        if not y.requires_grad:
            self.unreached.add(name)
            return
        n_bytes = y.numel() * y.element_size()
        if name in self.skipped or n_bytes > self._left:
            self.skipped.add(name)
            self.calls = [kept for kept in self.calls if kept.name != name]
            return
        self._left -= n_bytes
        self.calls.append(Recorded(name, module, x, y))


@contextmanager
def intercepted(
    modules: Mapping[str, nn.Linear],
    product: Product = exact_product,
    *,
    record: Collection[str] = (),
    max_bytes: int = MAX_OUTPUT_BYTES,
) -> Generator[Recordings]:
    """Make the Linears' outputs those of `product`, and keep the calls of those named in `record`."""
    recordings = Recordings(record, max_bytes)

    def on_call(name: str, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        x: Any = args[0] if args else None
        if not (is_plain(x) and is_plain(output) and isinstance(module, nn.Linear)):
            return None
        y = product(name, module, x)
        recordings.add(name, module, x, y)
        return y

    with hooked(modules, on_call, prepend=True):
        yield recordings
