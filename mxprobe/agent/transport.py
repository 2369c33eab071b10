"""Frames to the controller: a bounded queue, a sender thread, and what has been acknowledged.

Nothing here makes a caller wait: a batch that does not fit is dropped and counted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import Any

from mxprobe import protocol

MAX_PENDING_BYTES = 64 * 1024 * 1024
"""Bytes queued or sent and not yet acknowledged, over which batches are dropped."""


class Transport:
    """Owns the sending half of `sock`. `batch` and `control` are called from any thread."""

    def __init__(self, sock: socket.socket, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.sent_bytes = 0
        self.n_dropped_rows = 0
        self.broken = False
        self._sock = sock
        self._max_pending = max_pending_bytes
        self._queue: deque[bytes] = deque()
        self._unacked: dict[int, int] = {}
        self._next_seq = 1
        self._sending = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mxprobe-sender", daemon=True)
        self._thread.start()

    def batch(self, table: str, columns: dict[str, list[Any]]) -> bool:
        """Queue the rows of one table; False, with the rows counted as dropped, where they do not fit."""
        n_rows = len(next(iter(columns.values()))) if columns else 0
        with self._changed:
            seq = self._next_seq
            data = protocol.encode({"verb": "batch", "seq": seq, "table": table, "columns": columns})
            full = sum(self._unacked.values()) + len(data) > self._max_pending
            if self.broken or self._closed or full:
                self.n_dropped_rows += n_rows
                return False
            self._next_seq += 1
            self._unacked[seq] = len(data)
            self._queue.append(data)
            self._changed.notify_all()
        return True

    def control(self, frame: protocol.Frame) -> None:
        """Queue a frame that is not data: small, never dropped, in order with the batches."""
        with self._changed:
            self._queue.append(protocol.encode(frame))
            self._changed.notify_all()

    def acknowledge(self, seq: int) -> None:
        with self._changed:
            self._unacked.pop(seq, None)
            self._changed.notify_all()

    def pending(self) -> tuple[int, int]:
        """Return how many batches are not yet acknowledged, and their bytes."""
        with self._changed:
            return len(self._unacked), sum(self._unacked.values())

    def flush(self, timeout_s: float, *, acknowledged: bool = True) -> bool:
        """Wait until all is sent (and acknowledged); False after the timeout or when the peer is gone."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._queue or self._sending or (acknowledged and self._unacked):
                left = deadline - time.monotonic()
                if self.broken or left <= 0:
                    return False
                self._changed.wait(left)
        return not self.broken

    def close(self, timeout_s: float = 1.0) -> None:
        """End the sender thread and the connection, for this process and for any child that inherited it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the peer may have been first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._send_all()
        finally:  # however it ends, nobody empties the queue any more
            with self._changed:
                self.broken = self.broken or not self._closed
                self._sending = False
                self._queue.clear()
                self._changed.notify_all()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                data = self._queue.popleft()
                self._sending = True
            try:
                self._sock.sendall(data)
            except OSError:
                return
            self.sent_bytes += len(data)
