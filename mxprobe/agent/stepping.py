"""The global optimizer hook, put in and taken out without upsetting a step that is under way.

torch iterates over its dictionary of step hooks while calling them, so that a change from inside a hook or from
another thread can raise in the user's `optimizer.step()`. The dictionary is changed only while no thread is in
a step.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxprobe.measuring.compat import is_stepping, top_frames

StepHook = Callable[[Optimizer, Any, Any], None]

_PATIENCE_S = 10.0
_POLL_S = 0.001


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
    while any(is_stepping(frame) for frame in top_frames()):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
