"""`with mxprobe.rollout(model):` declares what a model computes inside the block, in this thread, to be a rollout.

The open blocks lie in a module object under a fixed name in `sys.modules`. The agent may have come into the process in
an archive of its own, beside an installed mxprobe, and both must find the same ones.
Standard library only and Python 3.9 syntax: the agent ships this file.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_REGISTRY = "_mxprobe_rollouts"


class _Block:
    def __init__(self, model: Any) -> None:
        self.model = model


@contextmanager
def rollout(model: Any) -> Generator[None, None, None]:
    """Declare every forward of `model` in this block, in this thread, to be part of a rollout.

    It costs about a microsecond, needs no attached agent and changes nothing in what is computed. Blocks may nest.

    Args:
        model: the model that generates, or a wrapper of it, or the part of it that is called.
    """
    registry = sys.modules.setdefault(_REGISTRY, ModuleType(_REGISTRY))
    by_thread: dict[int, list[Any]] = registry.__dict__.setdefault("blocks", {})
    blocks = by_thread.setdefault(threading.get_ident(), [])
    block = _Block(model)
    blocks.append(block)
    try:
        yield
    finally:
        blocks.remove(block)
        if not blocks:
            by_thread.pop(threading.get_ident(), None)


def declared_models() -> list[Any]:
    """Return the models of this thread's open `rollout` blocks, the outermost first."""
    by_thread = getattr(sys.modules.get(_REGISTRY), "blocks", {})
    return [block.model for block in by_thread.get(threading.get_ident(), ())]
