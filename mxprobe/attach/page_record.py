"""The pages of a process that still hold a statement of ours, on record until they are unmapped.

The record outlives a controller that is killed and an attach that was given up with its statement still queued: the
next attach, whose statement runs after those that were queued before, unmaps them all.
"""

import json
from contextlib import suppress
from pathlib import Path

Page = tuple[int, int]
"""Address and size in bytes."""

SUFFIX = ".pages"


class PageRecord:
    """A file in the private directory, one for each process; absent when there is nothing to unmap."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pages(self) -> list[Page]:
        try:
            return [(int(address), int(size)) for address, size in json.loads(self.path.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def add(self, page: Page) -> None:
        self._write([*self.pages(), page])

    def discard(self, pages: list[Page]) -> None:
        self._write([page for page in self.pages() if page not in pages])

    def _write(self, pages: list[Page]) -> None:
        if not pages:
            self.path.unlink(missing_ok=True)
            return
        with suppress(OSError):  # a full disk costs the process 4 KiB, not the attach
            self.path.write_text(json.dumps(pages))
