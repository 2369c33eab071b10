"""What an attach says while it runs, on stderr: a live line on a terminal, else a line when something changes."""

import sys
import threading
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


class Board:
    """One `Progress` for several speakers in threads of their own: lasting lines carry the speaker's name, the live
    line is that of the one who has waited longest to be shown."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def of(self, name: str) -> "Speaker":
        return Speaker(self, name)

    def say(self, text: str) -> None:
        with self._lock:
            self._progress.say(text)

    def show(self, name: str, text: str) -> None:
        with self._lock:
            self._turns.setdefault(name, 0)
            if self._turns[name] == min(self._turns.values()):
                self._turn += 1
                self._turns[name] = self._turn
                self._progress.show(text)

    def forget(self, name: str) -> None:
        with self._lock:
            self._turns.pop(name, None)

    def close(self) -> None:
        with self._lock:
            self._progress.close()


class Speaker:
    """One voice on a board. Without a name its lines stand as they are."""

    def __init__(self, board: Board, name: str) -> None:
        self._board = board
        self._name = name

    def say(self, text: str) -> None:
        self._board.forget(self._name)
        self._board.say(self._named(text))

    def show(self, text: str) -> None:
        self._board.show(self._name, self._named(text))

    def _named(self, text: str) -> str:
        return f"{self._name}: {text}" if self._name else text
