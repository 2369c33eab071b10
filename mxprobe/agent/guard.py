"""Keeps the agent's failures and side effects out of the user's run."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable

import torch

_MAX_DETAIL = 400


class Guard:
    """Counts the exceptions that were swallowed; over the budget, asks for the agent to be taken off.

    `on_error(where, detail)` is called for the first error at each place, `on_exhausted()` once. Neither may
    raise. Callable from any thread.
    """

    def __init__(self, budget: int, on_error: Callable[[str, str], None], on_exhausted: Callable[[], None]) -> None:
        self.n_errors = 0
        self._budget = budget
        self._on_error = on_error
        self._on_exhausted = on_exhausted
        self._first: dict[str, str] = {}
        self._lock = threading.Lock()

    def swallow(self, where: str, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
        with self._lock:
            self.n_errors += 1
            exhausted = self.n_errors == self._budget + 1
            new = where not in self._first
            self._first.setdefault(where, detail)
        if new:
            self._on_error(where, detail)
        if exhausted:
            self._on_exhausted()


@contextmanager
def undisturbed(device_type: str) -> Generator[None, None, None]:
    """Run torch operations that no mode of the user's sees and that see none of theirs.

    No gradient is recorded, autocast is off, and dispatch modes are left: selective activation checkpointing
    replays operators by position, so an operator of ours in its list would shift the user's.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
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
    """True for dense tensors and parameters: no DTensor, fake tensor or quantized subclass."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


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
