"""Real processes to attach to: a noisy one without torch, and a small seeded trainer that reports on itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from mxprobe.attach.elf import PAGE_BYTES, read_maps
from mxprobe.attach.payload import BEGINNING

MXPROBE = [sys.executable, "-m", "mxprobe"]

# Main thread and two others allocate, lock and unlock all the time: what an injection may run into.
NOISY = """
import signal, sys, threading, time
def noise():
    kept = []
    while True:
        kept.append([1] * 100)
        if len(kept) > 1000:
            kept.clear()
for _ in range(2):
    threading.Thread(target=noise, daemon=True).start()
print("up", flush=True)
count = 0
while True:
    count += 1
    if count % 1000 == 0:
        time.sleep(0.0005)
"""

# Writes each loss as hex (bit-identity), and on SIGUSR1 what is left of us in the process.
TRAINER = """
import gc, json, os, signal, sys, threading, time, zipimport
out, until = sys.argv[1], sys.argv[2]
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def residue(*_):
    left = {
        "modules": sorted(n for n in sys.modules if n.partition(".")[0] in ("mxprobe", "mxprobe_kernels")),
        "threads": sorted(t.name for t in threading.enumerate() if "mxprobe" in t.name),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "global_hooks": len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks)
            + len(optim._global_optimizer_post_hooks) + len(optim._global_optimizer_pre_hooks),
        "sockets": sum("socket" in os.readlink("/proc/self/fd/" + f) for f in os.listdir("/proc/self/fd")
            if os.path.exists("/proc/self/fd/" + f) or os.path.islink("/proc/self/fd/" + f)),
        "caches": [k for c in (sys.path_importer_cache, zipimport._zip_directory_cache) for k in c if "agent.zip" in k],
        "path": [p for p in sys.path if "agent.zip" in p],
        "main": sorted(n for n in vars(sys.modules["__main__"]) if "mxprobe" in n),
    }
    with open(out + ".residue.new", "w") as file:
        json.dump(left, file)
    os.replace(out + ".residue.new", out + ".residue")
signal.signal(signal.SIGUSR1, residue)
losses = open(out, "w", buffering=1)
print("up", flush=True)
while not os.path.exists(until):
    x = torch.randn(16, 32)
    loss = ((model(x) - x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.write(loss.item().hex() + "\\n")
    time.sleep(float(os.environ.get("PAUSE_S", "0.005")))
losses.write("end " + model[0].weight.sum().item().hex() + "\\n")
"""


@contextmanager
def running(
    source: str, *arguments: str, python: str = sys.executable, prefix: Sequence[str] = (), **options: Any
) -> Generator[subprocess.Popen[str]]:
    """A Python process that has printed `up`; killed at the end of the block."""
    command = [*prefix, python, "-c", source, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line == "up\n", f"{line!r}: {process.stderr.read() if process.stderr and not line else ''}"
        yield process
    finally:
        process.kill()
        process.communicate()


def mxprobe(
    *arguments: str, timeout_s: float = 60.0, prefix: Sequence[str] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, *MXPROBE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def until(condition: Callable[[], Any], *, timeout_s: float = 15.0) -> Any:
    """The condition's first true value; fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
    return value


class Trainer:
    """A running `TRAINER` and what it wrote."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process = process
        self.pid = str(process.pid)
        self._out = out

    def losses(self) -> list[str]:
        return self._out.read_text().splitlines()

    def wait_for_steps(self, count: int) -> None:
        goal = len(self.losses()) + count
        until(lambda: len(self.losses()) >= goal)

    def residue(self) -> dict[str, Any]:
        """What is left of us in the process, by its own account."""
        path = Path(f"{self._out}.residue")
        path.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        until(path.exists)
        return json.loads(path.read_text())


@contextmanager
def training(directory: Path, *, prefix: Sequence[str] = (), environ: Mapping[str, str] = {}) -> Generator[Trainer]:
    out = directory / "losses.txt"
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    with running(TRAINER, str(out), str(directory / "stop"), prefix=prefix, env=env) as process:
        trainer = Trainer(process, out)
        trainer.wait_for_steps(3)
        yield trainer


def nothing_left(residue: Mapping[str, Any], *, sockets: int = 0) -> bool:
    return not any(value for key, value in residue.items() if key != "sockets") and residue["sockets"] == sockets


def statements_in_memory(pid: int) -> int:
    """Pages of the process that begin with an injected statement; copies inside its heap are not page-aligned."""
    beginning = BEGINNING.encode()
    count = 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for mapping in read_maps(pid):
            if mapping.permissions != "rw-p" or mapping.path:
                continue
            with contextlib.suppress(OSError):  # the process unmapped it meanwhile
                for address in range(mapping.start, mapping.end, PAGE_BYTES):
                    count += os.pread(memory.fileno(), len(beginning), address) == beginning
    return count


def interpreters() -> list[str]:
    """This one, and every CPython 3.9 or newer that is lying about."""
    others = (*glob("/usr/bin/python3.[0-9]*"), *glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3")))
    runnable = [sys.executable]
    for python in others:
        if python.endswith("-config"):
            continue
        question = "import sys; print(sys.hexversion >= 0x03090000)"
        done = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
        if done.stdout == "True\n":
            runnable.append(python)
    return runnable
