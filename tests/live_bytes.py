"""How many bytes of tensors are alive at once, counted operator by operator: what an allocator would have to hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Context manager. Storages that operators make within it, each counted from its first tensor to its last.

    In this thread, and without what an operator takes for itself while it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._n_tensors: dict[int, int] = {}
        self._n_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {address_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self._see(x, is_new=address_of(x) not in given)
        return made

    def _see(self, x: torch.Tensor, *, is_new: bool) -> None:
        address = address_of(x)
        if not address or (not is_new and address not in self._n_tensors):
            return
        if address not in self._n_tensors:
            self._n_tensors[address], self._n_bytes[address] = 0, x.untyped_storage().nbytes()
            self.now += self._n_bytes[address]
            self.peak = max(self.peak, self.now)
        self._n_tensors[address] += 1
        weakref.finalize(x, self._forget, address)

    def _forget(self, address: int) -> None:
        self._n_tensors[address] -= 1
        if not self._n_tensors[address]:
            del self._n_tensors[address]
            self.now -= self._n_bytes.pop(address)


def address_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
