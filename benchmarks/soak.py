"""Attach to one training job and detach again for half an hour: does anything of ours stay, in the job or in mxprobe?

    python benchmarks/soak.py [--minutes 30] [--cycles 200] [--json]

The job is a seeded torch loop (embedding, norm, Linears, dropout, AdamW) that knows nothing of mxprobe. Cycles are
spread evenly over the time; in each, the job is attached for a third of it, with the flight recorder and sensitivity
on. A machine too busy for that takes up to a quarter longer, and makes fewer cycles if that is not enough. After each
detach, in the job: memory, threads, file descriptors, mappings (`/proc`), hooks of torch, modules of ours and all
objects (by its own account, on a signal). The same of the process that attaches, in which every controller has run.

Resident memory is what malloc has handed out and what it keeps; where the first is level, nothing is leaked. Memory is
held against the number of cycles by least squares, without the first tenth of the cycles, in which torch and
the allocator fill their caches. A leak of one attach would show as a slope: it is printed with its 95 % interval. At
the end the losses are held against those of a run that nobody attached to.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxprobe.attach.group import AttachOptions, Group
from mxprobe.attach.process import look_up
from mxprobe.attach.progress import Progress
from mxprobe.protocol import AgentConfig

CONFIG = AgentConfig(every=5, weights_every=20, sensitivity_every=50, record=True, max_overhead=0.03)
STUCK_S = 60.0
BYTES = {"rss_bytes": "resident memory, MB", "allocated_bytes": "handed out by malloc, MB"}
COUNTS = ("threads", "descriptors", "mappings", "hooks", "modules", "objects")
TARGET = """
import ctypes, gc, hashlib, json, os, signal, sys, threading, time
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim
out, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
body = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
model = nn.Sequential(nn.Embedding(50, 64), body, nn.LayerNorm(64), nn.Linear(64, 50, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
class MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
def allocated_bytes():
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if ask is None:
        return 0
    ask.restype = MallInfo
    found = ask()
    return found.uordblks + found.hblkhd
def tell(*_):
    gc.collect()
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    left += len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks)
    left += len(optim._global_optimizer_post_hooks) + len(optim._global_optimizer_pre_hooks)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("mxprobe", "mxprobe_kernels")]
    with open(out + ".told.new", "w") as file:
        facts = {"hooks": left, "modules": len(ours), "objects": len(gc.get_objects())}
        json.dump({**facts, "allocated_bytes": allocated_bytes()}, file)
    os.replace(out + ".told.new", out + ".told")
signal.signal(signal.SIGUSR1, tell)
losses = open(out, "w", buffering=1)
step = 0
while step != steps and not os.path.exists(out + ".stop"):
    x = torch.randint(0, 50, (4, 8))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.write(loss.item().hex() + "\\n")
    step += 1
    time.sleep(pause_s)
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
losses.write("end " + hashlib.sha256(state).hexdigest() + "\\n")
"""


@dataclass(frozen=True)
class Sample:
    """What one process holds. What comes after `mappings` is known of the job alone."""

    rss_bytes: int
    threads: int
    descriptors: int
    mappings: int
    hooks: int = 0
    modules: int = 0
    objects: int = 0
    allocated_bytes: int = 0


@dataclass
class Result:
    cycles: int = 0
    seconds: float = 0.0
    steps: int = 0
    identical: bool = False
    job: list[Sample] = field(default_factory=list)
    """Before the first attach, then after each detach."""
    mxprobe: list[Sample] = field(default_factory=list)
    errors: int = 0
    """Told by the agents."""
    dropped: int = 0


def sample(pid: int, **told: int) -> Sample:
    proc = Path("/proc", str(pid))
    pages = int((proc / "statm").read_text().split()[1])
    return Sample(
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        threads=len(list((proc / "task").iterdir())),
        descriptors=len(list((proc / "fd").iterdir())),
        mappings=len((proc / "maps").read_text().splitlines()),
        **told,
    )


def sample_job(process: subprocess.Popen[bytes], out: Path) -> Sample:
    told = Path(f"{out}.told")
    told.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    wait_until(told.exists, process)
    return sample(process.pid, **json.loads(told.read_text()))


def wait_until(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STUCK_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the job has ended, or is stuck")
        time.sleep(0.02)


def slope(values: Sequence[float], without: float = 0.1) -> tuple[float, float]:
    """Per cycle, by least squares, without so much of the beginning; and half of its 95 % interval."""
    kept = values[max(int(without * len(values)), 1) :]
    n, middle = len(kept), (len(kept) - 1) / 2
    if n < 3:
        return 0.0, float("inf")
    spread = sum((i - middle) ** 2 for i in range(n))
    mean = statistics.fmean(kept)
    gradient = sum((i - middle) * (value - mean) for i, value in enumerate(kept)) / spread
    residuals = [value - mean - gradient * (i - middle) for i, value in enumerate(kept)]
    error = (sum(r * r for r in residuals) / (n - 2) / spread) ** 0.5
    return gradient, 1.96 * error


def attach_once(pid: int, trace: Path, duration_s: float, result: Result) -> None:
    options = AttachOptions(trace, CONFIG, duration_s=duration_s)
    Group({"job": look_up(pid)}, options, Progress(io.StringIO())).run()
    agent = json.loads((trace / "run.json").read_text())["agent"]
    result.errors += agent["n_errors"]
    result.dropped += agent["n_dropped"]


def soak(minutes: float, cycles: int, pause_s: float) -> Result:
    result, cycle_s = Result(), minutes * 60 / cycles
    with tempfile.TemporaryDirectory() as name:
        out, control = Path(name, "attached"), Path(name, "control")
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", TARGET]
        process = subprocess.Popen([*command, str(out), "-1", str(pause_s)], env=environ)
        try:
            wait_until(lambda: out.exists() and out.stat().st_size > 200, process)
            began = time.monotonic()
            result.job.append(sample_job(process, out))
            result.mxprobe.append(sample(os.getpid()))
            for number in range(cycles):
                trace = Path(name, "run.mxprobe")
                if time.monotonic() - began > 1.25 * 60 * minutes:
                    break
                attach_once(process.pid, trace, cycle_s / 3, result)
                subprocess.run(["rm", "-r", str(trace)], check=True)
                result.job.append(sample_job(process, out))
                result.mxprobe.append(sample(os.getpid()))
                result.cycles += 1
                time.sleep(max(0.0, began + (number + 1) * cycle_s - time.monotonic()))
                if number % 10 == 9:
                    rss_mb = result.job[-1].rss_bytes / 1e6
                    print(f"{number + 1} cycles, {rss_mb:.1f} MB", file=sys.stderr, flush=True)
            result.seconds = time.monotonic() - began
            Path(f"{out}.stop").touch()
            process.wait()
        finally:
            process.kill()
            process.wait()
        seen = out.read_text().splitlines()
        result.steps = len(seen) - 1
        subprocess.run([*command, str(control), str(result.steps), "0"], env=environ, check=True)
        result.identical = control.read_text().splitlines() == seen
    return result


def table(result: Result) -> str:
    lines = [
        f"{result.cycles} cycles in {result.seconds / 60:.1f} minutes, {result.steps} steps, "
        f"losses and state {'identical' if result.identical else 'NOT identical'} to a run without; "
        f"{result.errors} errors, {result.dropped} rows dropped\n",
        "| | in the job: before, after the first tenth, at the end | in mxprobe: after the first tenth, at the end |",
        "|---|---|---|",
    ]
    tenth = max(result.cycles // 10, 1)
    for what in ("rss_bytes", "allocated_bytes", *COUNTS):
        of_job, of_us = ([getattr(s, what) for s in samples] for samples in (result.job, result.mxprobe))
        scale = 1e-6 if what in BYTES else 1
        job, us = (
            ", ".join(f"{scale * v:.1f}" if scale != 1 else str(v) for v in values)
            for values in ((of_job[0], of_job[tenth], of_job[-1]), (of_us[tenth], of_us[-1]))
        )
        lines.append(f"| {BYTES.get(what, what)} | {job} | {us if any(of_us) else ''} |")
    cells: list[str] = []
    for samples in (result.job, result.mxprobe):
        gradient, half = slope([s.rss_bytes for s in samples])
        cells.append(f"{gradient / 1e3:+.1f} ± {half / 1e3:.1f}")
    lines.append(f"| slope of memory, kB per cycle, 95 % interval | {cells[0]} | {cells[1]} |")
    gradient, half = slope([s.allocated_bytes for s in result.job], without=0.5)
    words = "slope of what malloc has handed out in the second half, kB per cycle"
    lines.append(f"| {words} | {gradient / 1e3:+.1f} ± {half / 1e3:.1f} | |")
    gradient, half = slope([s.objects for s in result.job])
    lines.append(f"| slope of objects, per cycle, 95 % interval | {gradient:+.1f} ± {half:.1f} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="of the job, between steps")
    parser.add_argument("--json", action="store_true", help="print every sample instead of a table")
    options = parser.parse_args()
    result = soak(options.minutes, options.cycles, options.pause_ms / 1e3)
    print(json.dumps(asdict(result)) if options.json else table(result), flush=True)


if __name__ == "__main__":
    main()
