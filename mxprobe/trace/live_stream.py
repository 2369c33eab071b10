"""Read a live Arrow stream that may be growing, unfinished or cut: every complete batch, then the reason it ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from .arrow import UNREADABLE, check_readable, damaged


class LiveStream:
    """Iterates over the complete record batches of a `.arrows` file.

    With `file`, an open `pa.OSFile` of it, that is read, and closed at the end. After the iteration `n_batches` counts
    the batches and `is_cut` says whether bytes of an incomplete batch follow.

    Raises:
        FileNotFoundError: no such file: compaction has made a part of it.
        TraceError: a file that cannot be opened.
    """

    def __init__(self, path: Path, file: Any = None) -> None:
        self.path = path
        self._file = file
        self.n_batches = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[Any]:
        # Bounded by the size at opening: a writer that appends meanwhile must not look like a cut.
        try:
            file = pa.OSFile(str(self.path), "rb") if self._file is None else self._file
            size = file.size()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise damaged(self.path, error) from None
        with file:
            try:
                stream = pa.ipc.open_stream(file)
            except UNREADABLE:
                self.is_cut = size > 0
                return
            while True:
                end_of_last = file.tell()
                try:
                    batch = stream.read_next_batch()
                    check_readable(batch)
                except StopIteration:
                    self.is_cut = False
                    return
                except UNREADABLE:
                    self.is_cut = end_of_last < size
                    return
                self.n_batches += 1
                yield batch
