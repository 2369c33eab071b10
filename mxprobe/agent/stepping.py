"""The global optimizer hook, put in and taken out without upsetting a step that is under way.

torch iterates over its dictionary of step hooks while calling them, so that a change from inside a hook or from
another thread can raise in the user's `optimizer.step()`. The dictionary is changed only while no thread is in
a step.
"""

from __future__ import annotations

import gc
import sys
import time
from types import FrameType
from typing import Any, Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

StepHook = Callable[[Optimizer, Any, Any], None]

_PATIENCE_S = 10.0
_POLL_S = 0.001
_STEP_FILE = sys.modules["torch.optim.optimizer"].__file__
_STEP_FUNCTION = "wrapper"


def watch_steps(hook: StepHook) -> Callable[[], None]:
    """Call `hook` after every optimizer step of the process; returns what takes it out again.

    Not from the training thread, which would wait for itself. Where steps never pause, the hook goes in (or stays,
    and must by then do nothing) after `_PATIENCE_S`.
    """
    between_steps(_PATIENCE_S)
    handle = register_optimizer_step_post_hook(hook)

    def remove() -> None:
        if between_steps(_PATIENCE_S):
            handle.remove()

    return remove


def between_steps(timeout_s: float) -> bool:
    """Wait until no thread is inside `Optimizer.step`; False after the timeout."""
    deadline = time.monotonic() + timeout_s
    while any(_is_stepping(frame) for frame in _current_frames()):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _current_frames() -> list[FrameType]:
    """The top frame of every thread.

    Up to CPython 3.11.7, a garbage collection inside `sys._current_frames` that frees a `threading.local` waits for
    a lock which that call holds: the process hangs. So none may begin there.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(sys._current_frames().values())  # pyright: ignore[reportPrivateUsage]
    finally:
        if collects:
            gc.enable()


def _is_stepping(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _STEP_FUNCTION and frame.f_code.co_filename == _STEP_FILE:
            return True
        frame = frame.f_back
    return False
