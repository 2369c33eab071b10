"""What an attach tells on stderr while it runs: a live line on a terminal, else a line when something changes."""

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.status import Status

_PLAIN_EVERY_S = 10.0


class Progress:
    """Lasting lines and one live line, written by any number of threads.

    `say` writes a lasting line. `show` replaces the live one; a plain stream gets at most one in ten seconds. Lines of
    a named process begin with its name. The live line is that of the process which has waited longest to be shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._shown = ""
        self._shown_at = float("-inf")
        self._turn = 0
        self._turns: dict[str, int] = {}
        """Name -> the turn at which its line was last the live one."""

    def say(self, text: str, name: str = "") -> None:
        with self._lock:
            self._turns.pop(name, None)
            self._stop()
            self._write(_named(name, text))
            self._shown_at = float("-inf")

    def show(self, text: str, name: str = "") -> None:
        with self._lock:
            self._turns.setdefault(name, 0)
            if self._turns[name] > min(self._turns.values()):
                return
            self._turn += 1
            self._turns[name] = self._turn
            self._show(_named(name, text))

    def forget(self, name: str) -> None:
        """Note that this process has nothing more to show."""
        with self._lock:
            self._turns.pop(name, None)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if self._stream.isatty():
            self._animate(text)
        elif text != self._shown and now - self._shown_at >= _PLAIN_EVERY_S:
            self._shown, self._shown_at = text, now
            self._write(text)

    def _animate(self, text: str) -> None:
        from rich.console import Console
        from rich.markup import escape

        if self._status is None:
            self._status = Console(file=self._stream).status(escape(text))
            self._status.start()
        else:
            self._status.update(escape(text))

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal may be gone; the recording goes on
            print(text, file=self._stream, flush=True)


def _named(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text
