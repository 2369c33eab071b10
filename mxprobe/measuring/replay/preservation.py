"""Random states, buffers and attributes, which a forward pass changes besides its result: saved, then put back.

Random states are those of torch (CPU and the model's CUDA devices), Python and numpy. Buffers are written back always:
batch norm updates its statistics without telling their version counter. Attributes are compared by identity, and
touched only where they were bound to something else.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.compat import own_parts, version_of

MAX_BUFFER_BYTES = 1 << 28
"""Larger buffers (quantized weights held as such) are not copied; a change that shows in their version is an error."""


_NOTHING = object()


class BufferChangedError(Exception):
    """A buffer that was too large to be copied was changed by the forward."""


@dataclass(frozen=True)
class RandomState:
    """Every generator that a forward draws from."""

    cpu: torch.Tensor
    cuda: dict[torch.device, torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, module: nn.Module) -> RandomState:
        """Copy the present states, for the CUDA devices that hold the module's parameters.

        CUDA's state is a seed and an offset kept on the host, so nothing waits.
        """
        devices = {p.device for p in module.parameters() if p.is_cuda} if torch.cuda.is_initialized() else set()
        cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
        numpy = _numpy_random()
        state = numpy.get_state() if numpy is not None else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), state)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        numpy = _numpy_random()
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


@contextmanager
def preserved(module: nn.Module, start: RandomState) -> Generator[None, None, None]:
    """Run with the random states `start`; afterwards states, buffers and attributes are what they were before.

    A tensor that is neither buffer nor parameter and is changed in place is not seen. BufferChangedError where a
    buffer was changed of which no copy was kept.
    """
    before = RandomState.now(module)
    kept = [_Kept(inner) for inner in module.modules()]
    try:
        start.restore()
        yield
    finally:
        before.restore()
        lost = [name for each in kept for name in each.put_back()]
        if lost:
            raise BufferChangedError(f"the forward changes the large buffer {lost[0]}")


class _Kept:
    """Attributes and buffers of one module, itself only."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._registered: dict[str, Any] = dict(own_parts(module, "_buffers"))
        self._buffers: list[tuple[str, torch.Tensor, int, torch.Tensor | None]] = []
        with torch.no_grad():
            for name, buffer in self._registered.items():
                if buffer is not None:
                    small = buffer.numel() * buffer.element_size() <= MAX_BUFFER_BYTES
                    self._buffers.append((name, buffer, version_of(buffer), buffer.clone() if small else None))

    def put_back(self) -> list[str]:
        """Return the names of buffers that were changed and could not be put back."""
        _restore(vars(self._module), self._attributes)
        _restore(own_parts(self._module, "_buffers"), self._registered)
        lost: list[str] = []
        with torch.no_grad():
            for name, buffer, version, copy in self._buffers:
                if copy is not None:
                    buffer.data.copy_(copy)  # `data`: a graph of the user's that saved the buffer stays valid
                elif version_of(buffer) != version:
                    lost.append(name)
        return lost


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Bind the names in `now` to what they were bound to `before`; those that are so already are not touched."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name, _NOTHING) is not value:
            now[name] = value
