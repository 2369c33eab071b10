"""Whether the process that is attached is still that process, and alive."""

import time

from mxprobe.attach.process import Process

_EXIT_GRACE_S = 2.0
_DYING_S = 1.0


class VitalSigns:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._died_at = float("-inf")

    def lives_on(self) -> bool:
        """False if it is gone, or ends in a moment: the kernel closes its connections before it is dead."""
        deadline = time.monotonic() + _DYING_S
        while self._process.is_same_and_alive():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.02)
        return False

    def is_long_dead(self) -> bool:
        """True once it has been dead for a while; until then its connection is given time to end first.

        A forked child that still holds the connection would keep it open for ever.
        """
        if self._process.is_same_and_alive():
            self._died_at = float("-inf")
        elif self._died_at < 0:
            self._died_at = time.monotonic()
        return self._died_at > 0 and time.monotonic() - self._died_at > _EXIT_GRACE_S
