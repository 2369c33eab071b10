"""A process that goes on writing a trace, for tests of what watches one."""

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Writes a step of all tables every 0.1 s until the file `stop` appears, then closes the trace.
WRITER = """
import sys, time
from pathlib import Path
from mxprobe.trace import TraceWriter
from tests.trace_files import append, frames
directory, stop = map(Path, sys.argv[1:3])
n_steps, every = map(int, sys.argv[3:])
tables = frames(n_layers=1, n_steps=n_steps, every=every)
with TraceWriter(directory, {}) as writer:
    append(writer, {"modules": tables.pop("modules")})
    for step in range(1, n_steps + 1):
        append(writer, {name: rows[rows["step"] == step] for name, rows in tables.items()})
        if stop.exists():
            break
        time.sleep(0.1)
"""


@dataclass
class Writing:
    directory: Path
    stop_file: Path
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        self.stop_file.touch()
        assert self.process.wait(60) == 0


@contextmanager
def writing_process(base: Path, *, n_steps: int, every: int, until_table: str) -> Generator[Writing]:
    """A writer of `base`/run.mxprobe that has begun `until_table`; killed at the end of the block."""
    directory, stop = base / "run.mxprobe", base / "stop"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WRITER, str(directory), str(stop), str(n_steps), str(every)]
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (directory / "live" / "rank=0" / f"{until_table}-00000.arrows").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield Writing(directory, stop, process)
    finally:
        process.kill()
        process.wait()
