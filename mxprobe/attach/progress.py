"""What an attach says while it runs, on stderr: a live line on a terminal, else a line when something changes."""

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.status import Status

_PLAIN_EVERY_S = 10.0


class Progress:
    """`say` writes a lasting line; `show` replaces the live one (on a plain stream: at most one in ten seconds)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._status: Status | None = None
        self._shown = ""
        self._shown_at = float("-inf")

    def say(self, text: str) -> None:
        self._stop()
        self._write(text)
        self._shown_at = float("-inf")

    def show(self, text: str) -> None:
        if self._stream.isatty():
            self._animate(text)
            return
        now = time.monotonic()
        if text != self._shown and now - self._shown_at >= _PLAIN_EVERY_S:
            self._shown, self._shown_at = text, now
            self._write(text)

    def close(self) -> None:
        self._stop()

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
