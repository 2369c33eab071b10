"""Every Linear's product computed by a function of ours while a call is replayed.

A forward hook of ours, before all others, replaces the output; so quantized subclasses and emulated forwards are
replayed in high precision too, and an arm can put any error in. The gradient is taken at the replaced output, at the
graph edge as it was before anything in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.measuring.isolation import in_backward, is_plain

Product = Callable[[str, nn.Linear, torch.Tensor], torch.Tensor]
"""(name, module, x [..., K]) -> y [..., O], bias included."""


def exact_product(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """x W^T + b in the precision that the run calls high: its dtypes, its autocast."""
    return F.linear(x, module.weight, module.bias)


class Recorded:
    """One call of one Linear: its input, and where its output's gradient is to be had."""

    def __init__(self, name: str, module: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> None:
        self.name = name
        self.module = module
        self.edge = torch.autograd.graph.get_gradient_edge(y)
        self._x = x.detach()
        self._version = x._version

    @property
    def x(self) -> torch.Tensor | None:
        """[..., K], or None where it was changed in place since."""
        return self._x if self._x._version == self._version else None


class Intercept:
    """Context manager: the Linears' outputs are `product`'s. Calls of those in `record` are kept in `calls`.

    Only as many are kept as `max_bytes` of outputs allow; `skipped` names the others.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Linear],
        product: Product = exact_product,
        *,
        record: Collection[str] = (),
        max_bytes: int = 1 << 31,
    ) -> None:
        self.calls: list[Recorded] = []
        self.skipped: set[str] = set()
        self.unreached: set[str] = set()
        """Modules in `record` that were called without gradient."""
        self._modules = modules
        self._product = product
        self._record = set(record)
        self._left = max_bytes
        self._handles: list[Any] = []

    def __enter__(self) -> Intercept:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._hook(name), prepend=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            x: Any = args[0] if args else None
            if not (is_plain(x) and is_plain(output) and isinstance(module, nn.Linear)):
                return None
            y = self._product(name, module, x)
            if name not in self._record or in_backward():
                return y
            if not y.requires_grad:
                self.unreached.add(name)
            else:
                self._keep(Recorded(name, module, x, y), y.numel() * y.element_size())
            return y

        return hook

    def _keep(self, call: Recorded, n_bytes: int) -> None:
        if call.name in self.skipped or n_bytes > self._left:
            self.skipped.add(call.name)
            self.calls = [kept for kept in self.calls if kept.name != call.name]
            return
        self._left -= n_bytes
        self.calls.append(call)
