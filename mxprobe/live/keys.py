"""Keys from a terminal, one at a time and without Enter; the terminal is as before afterwards."""

import os
import select
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager

_SEQUENCES = {"[A": "up", "[B": "down", "OA": "up", "OB": "down", "[5~": "page up", "[6~": "page down"}
_NAMES = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape"}


class Keyboard:
    """Reads single keys. Where standard input is no terminal, `read` waits and gives nothing."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    @contextmanager
    def unbuffered(self) -> Generator[None]:
        """Have the terminal hand over each key at once and without an echo, as long as the block lasts."""
        descriptor = self._descriptor
        before = None if descriptor is None else termios.tcgetattr(descriptor)
        if descriptor is not None:
            tty.setcbreak(descriptor)
        try:
            yield
        finally:
            if descriptor is not None and before is not None:
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def read(self, timeout_s: float) -> list[str]:
        """Return the keys pressed within the time: characters as they are, others by name (`enter`, `up`, ...)."""
        waited_on = [] if self._descriptor is None else [self._descriptor]
        ready, _, _ = select.select(waited_on, [], [], timeout_s)
        if not ready or self._descriptor is None:
            return []
        data = os.read(self._descriptor, 1024)
        if not data:  # hung up
            self._descriptor = None
            return ["q"]
        return parse_keys(data.decode(errors="replace"))


def parse_keys(text: str) -> list[str]:
    """Split what a terminal sent into keys; an escape sequence that means nothing here is dropped."""
    keys: list[str] = []
    while text:
        if text.startswith("\x1b") and len(text) > 1:
            name = next((sequence for sequence in _SEQUENCES if text.startswith(sequence, 1)), None)
            if name is None:
                break
            keys.append(_SEQUENCES[name])
            text = text[1 + len(name) :]
        else:
            keys.append(_NAMES.get(text[0], text[0]))
            text = text[1:]
    return keys
