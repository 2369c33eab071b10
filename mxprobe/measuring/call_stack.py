"""What the Python stack says of a forward pass: where it is called from, and whether a known function is running.

Only code objects and module names are read. A frame's local variables would be kept alive by looking at them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

from mxprobe.measuring.compat import frames_from, is_generation, qualified_name

_MAX_FRAMES = 64


class Stack(NamedTuple):
    """What was found on a stack."""

    site: int
    """Equal for calls that come from the same place in the program, all callers included: those of one loop."""
    generates: bool
    """transformers' `generate` is running."""
    function: str
    """The one of the looked-for functions that is running, innermost first; empty if none is."""


class StackReader:
    """Looks for functions by `name` or `module.name`; of a class also by `Class.name`, from Python 3.11 on."""

    def __init__(self, functions: Iterable[str] = ()) -> None:
        self.functions = tuple(functions)
        self._by_name: dict[str, list[str]] = {}
        for each in self.functions:
            self._by_name.setdefault(each.rpartition(".")[2], []).append(each)

    def read(self, frame: FrameType | None) -> Stack:
        """Read the stack from `frame` outwards, 64 frames at most."""
        places: list[int] = []
        generates, function = False, ""
        for each in islice(frames_from(frame), _MAX_FRAMES):
            code = each.f_code
            places += (id(code), each.f_lasti)
            generates = generates or is_generation(code)
            if not function and code.co_name in self._by_name:
                function = self._match(code, each)
        return Stack(hash(tuple(places)), generates, function)

    def _match(self, code: CodeType, frame: FrameType) -> str:
        module = frame.f_globals.get("__name__", "")
        known = f"{module}.{code.co_name}", f"{module}.{qualified_name(code)}"
        return next((n for n in self._by_name[code.co_name] if any(f".{k}".endswith(f".{n}") for k in known)), "")
