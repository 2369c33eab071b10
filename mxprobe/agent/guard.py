"""Keeps the agent's failures and side effects out of the user's run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable

import torch

from mxprobe.agent.interruptions import is_of_a_signal_handler

_MAX_DETAIL = 400


class Guard:
    """Counts the exceptions that were swallowed; over the budget, asks for the agent to be taken off.

    `on_error(where, detail)` is called for the first error at each place, `on_exhausted()` once. What they raise is
    dropped. Callable from any thread.
    """

    def __init__(self, budget: int, on_error: Callable[[str, str], None], on_exhausted: Callable[[], None]) -> None:
        self.n_errors = 0
        self._budget = budget
        self._on_error = on_error
        self._on_exhausted = on_exhausted
        self._places: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def swallow(self, where: str, error: BaseException, then: Callable[[], None] | None = None) -> None:
        """Count the error, tell of it if it is the first there, and do `then`, whose own errors are dropped.

        Raises nothing but what a signal handler of the user's raised while our code ran: that is the user's.
        """
        if is_of_a_signal_handler(error):
            raise error
        if os.getpid() != self._pid:
            return  # a forked child: nobody to tell, and a lock that may stay taken
        with self._lock:
            self.n_errors += 1
            exhausted = self.n_errors == self._budget + 1
            new = where not in self._places
            self._places.add(where)
        if new:
            self._tell(where, error)
        for act in (then, self._on_exhausted if exhausted else None):
            if act is not None:
                with contextlib.suppress(Exception):
                    act()

    def _tell(self, where: str, error: BaseException) -> None:
        try:
            detail = f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
        except Exception:
            detail = f"{type(error).__name__}, whose own words failed"
        with contextlib.suppress(Exception):
            self._on_error(where, detail)


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
