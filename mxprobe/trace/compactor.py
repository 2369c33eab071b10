"""The writer's own thread: makes parts of full live files and keeps the trace within its retention."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from . import layout
from .compaction import compact_file
from .retention import FAILURES, RetentionEnforcer


class Compactor:
    """Works through what `hand_over` gives it, in order. The thread begins with the first file.

    Args:
        directory: of the trace.
        enforcer: asked after each part; None: nothing is thinned.
        done: told the size in bytes of each file that is dealt with, made a part or not.
    """

    def __init__(self, directory: Path, enforcer: RetentionEnforcer | None, done: Callable[[int], None]) -> None:
        self._directory = directory
        self._enforcer = enforcer
        self._done = done
        self._files: queue.SimpleQueue[tuple[layout.LiveFile, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.unexpected: Exception | None = None
        """The first error that is none of `FAILURES`: the thread goes on, or the writer would wait for it for ever."""

    def hand_over(self, file: layout.LiveFile, size_bytes: int) -> None:
        """A live file that nobody writes any more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trace-compaction", daemon=True)
            self._thread.start()
        self._files.put((file, size_bytes))

    def finish(self) -> None:
        """Return when all is done; nothing may be handed over afterwards."""
        if self._thread is not None:
            self._files.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (item := self._files.get()) is not None:
            file, size_bytes = item
            with self._outliving():  # a full disk: the live file stays, and is read as it is
                compact_file(self._directory, file)
            self._done(size_bytes)
            if self._enforcer is not None:
                with self._outliving():
                    self._enforcer.enforce(time.monotonic())

    @contextlib.contextmanager
    def _outliving(self) -> Generator[None, None, None]:
        try:
            yield
        except FAILURES:
            pass
        except Exception as error:
            self.unexpected = self.unexpected or error
