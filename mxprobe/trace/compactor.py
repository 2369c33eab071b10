"""The writer's own thread: makes parts of full live files and keeps the trace within its retention."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trace-compaction")
        self.unexpected: Exception | None = None
        """The first error that is none of `FAILURES`: the thread goes on, or the writer would wait for it for ever."""

    def hand_over(self, file: layout.LiveFile, size_bytes: int) -> None:
        """Take a live file that nobody writes any more."""
        self._thread.submit(self._compact, file, size_bytes)

    def finish(self) -> None:
        """Return when all is done; nothing may be handed over afterwards."""
        self._thread.shutdown()

    def _compact(self, file: layout.LiveFile, size_bytes: int) -> None:
        # On a full disk the live file stays, and is read as it is.
        self._try(lambda: compact_file(self._directory, file))
        self._done(size_bytes)
        if (enforcer := self._enforcer) is not None:
            self._try(lambda: enforcer.enforce(time.monotonic()))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except FAILURES:
            pass
        except Exception as error:
            self.unexpected = self.unexpected or error
