"""Keep the operations of ours apart from the run: from its modes, its tracing and its captures."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


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
        leave_modes = leave_dispatch_modes()
        if leave_modes is not None:
            stack.enter_context(leave_modes())
        yield


def leave_dispatch_modes() -> Callable[[], Any] | None:
    """A context manager without the user's dispatch modes, where this torch has one."""
    from torch.utils import _python_dispatch

    return getattr(_python_dispatch, "_disable_current_modes", None)


def is_plain(tensor: Any) -> bool:
    """True for dense tensors and parameters with values: no DTensor, fake or meta tensor, or quantized one."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def is_off_limits(x: torch.Tensor) -> bool:
    """True where operators of ours would be recorded, batched or captured: tracing, functorch, CUDA graphs."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    functorch = getattr(torch._C, "_functorch", None)  # pyright: ignore[reportPrivateUsage]
    if functorch is not None and functorch.peek_interpreter_stack() is not None:
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """True inside a backward pass: a forward there is the recomputation of a checkpointed region."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
