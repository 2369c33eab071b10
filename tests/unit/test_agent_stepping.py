"""Looking at the threads of the user's process must not be able to hang it."""

from __future__ import annotations

import subprocess
import sys

# Every allocation may collect, and every collection frees thread-local storage in a cycle.
HANGS_WITHOUT_CARE = """
import gc, threading
from mxprobe.agent.stepping import between_steps

class Cycle(threading.local):
    def __init__(self):
        self.me = self

gc.set_threshold(1, 1, 1)
for _ in range(20_000):
    Cycle()
    assert between_steps(1.0)
assert gc.isenabled()
gc.disable()
assert between_steps(1.0)
assert not gc.isenabled()
"""


def test_a_collection_during_the_look_does_not_hang_the_process() -> None:
    subprocess.run([sys.executable, "-c", HANGS_WITHOUT_CARE], check=True, timeout=120)
