"""Keep our operations apart from the run: from its modes, its tracing and its captures."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mxprobe.measuring import compat


@contextmanager
def undisturbed(device_type: str) -> Generator[None, None, None]:
    """Run torch operations that no mode of the user's sees and that see none of theirs.

    No gradient is recorded, autocast is off, and dispatch modes are left: selective activation checkpointing
    replays operators by position, so an operator of ours in its list would shift the user's.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if device_type != "meta":  # where an offloaded parameter is; it has no autocast
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(compat.without_dispatch_modes())
        yield


def is_plain(tensor: Any) -> bool:
    """Say whether a value is a dense tensor or parameter with values: no DTensor, fake, meta or quantized tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def is_off_limits(x: torch.Tensor) -> bool:
    """Say whether operators of ours would be recorded, batched or captured: tracing, functorch, CUDA graphs."""
    if compat.is_traced() or compat.is_transformed():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def kind_of(x: torch.Tensor) -> str:
    """Name the dtype and shape of a tensor."""
    return f"{str(x.dtype).replace('torch.', '')} {list(x.shape)}"
