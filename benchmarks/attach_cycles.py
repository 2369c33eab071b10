"""Attach to a live training loop and detach again, many times; was it ever harmed, and did it stay the same bits?

    python benchmarks/attach_cycles.py --mechanism ptrace --cycles 200 [--python PATH] [--target KIND] [--json]
    python benchmarks/attach_cycles.py --all          200 of each way in, 50 by ptrace on every other Python found
    python benchmarks/attach_cycles.py --every-target  50 by ptrace on each kind of job of cycle_targets.py

The target is a seeded torch loop (dropout, AdamW) in a process of its own that knows nothing of mxprobe (for
`listener`: started by `mxprobe run`), or two ranks of one. After each cycle it must go on stepping. At its end, losses
as hex, a hash of its parameters and of the state of its random generator are held against a second run, which nobody
attached to.

With `--python` of an interpreter that has no torch the target is a loop of the standard library that logs (role
`metrics`), its losses sums of random numbers.

Prints a row of a table for each. `stuck` counts cycles after which no step came in 20 s, `crashed` ends of the process,
`refused` attaches that did not come about, `left` cycles after which a page of ours was still mapped. `stopped` is
for how long the main thread stood still, entering and unmapping counted apart (with gdb: gdb's whole run, all
threads); `latency` is from asking to the agent's answer.
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
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mxprobe.attach import MECHANISMS
from mxprobe.attach.elf import PAGE_BYTES, read_maps
from mxprobe.attach.group import AttachOptions, Group
from mxprobe.attach.payload import BEGINNING
from mxprobe.attach.process import look_up
from mxprobe.attach.progress import Progress
from mxprobe.errors import AttachError
from mxprobe.protocol import AgentConfig

STUCK_S = 20.0
ATTACHED_S = 0.25
TARGETS = Path(__file__).with_name("cycle_targets.py")
KINDS = ("plain", "checkpoint", "reentrant", "loader", "moe", "torchao", "ddp", "fsdp2", "grpo")
LINE_BYTES = 10
"""At least, of a step."""
N_RANKS = {"ddp": 2, "fsdp2": 2}
STDLIB_TARGET = """
import hashlib, os, random, sys, time
out, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
class Tracking:
    def log(self, data, step, backend=None):
        pass
module = sys.modules["verl.utils.tracking"] = type(sys)("verl.utils.tracking")
module.Tracking = Tracking
random.seed(0)
tracking, state, step = Tracking(), [0.0] * 64, 0
losses = open(out, "w", buffering=1)
while step != steps and not os.path.exists(out + ".stop"):
    state = [0.9 * value + random.gauss(0.0, 1.0) for value in state]
    loss = sum(value * value for value in state)
    losses.write(loss.hex() + "\\n")
    step += 1
    tracking.log({"loss": loss}, step=step)
    time.sleep(pause_s)
losses.write("end " + hashlib.sha256(repr((state, random.getstate())).encode()).hexdigest() + "\\n")
"""


@dataclass
class Result:
    mechanism: str
    target: str = "plain"
    python: str = ""
    cycles: int = 0
    stuck: int = 0
    crashed: int = 0
    refused: int = 0
    left: int = 0
    steps: int = 0
    identical: bool = False
    stopped_ms: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)

    @property
    def row(self) -> str:
        cells = [
            self.mechanism,
            self.target,
            self.python,
            self.cycles,
            self.stuck,
            self.crashed,
            self.refused,
            self.left,
            self.steps,
        ]
        cells += ["yes" if self.identical else "NO", _spread(self.stopped_ms), _spread(self.latency_ms)]
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| way in | job | Python | cycles | stuck | crashed | refused | left | steps | identical "
    "| stopped ms p50 / p99 / max | latency ms p50 / p99 / max |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def _spread(values: list[float]) -> str:
    if not any(values):
        return "0"
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return f"{statistics.median(ordered):.1f} / {p99:.1f} / {ordered[-1]:.1f}"


def lines_of(paths: Sequence[Path]) -> list[list[str]]:
    return [path.read_text().splitlines() if path.exists() else [] for path in paths]


def outs_of(out: Path, kind: str) -> list[Path]:
    """What each rank writes."""
    return [Path(f"{out}.{rank}") for rank in range(N_RANKS[kind])] if kind in N_RANKS else [out]


def wait_for_steps(process: subprocess.Popen[bytes], outs: Sequence[Path], count: int) -> bool:
    """False if the steps did not come in time, or the process ended."""
    goal, deadline = max(map(_size, outs)) + count * LINE_BYTES, time.monotonic() + STUCK_S
    while min(map(_size, outs)) < goal:
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _size(out: Path) -> int:
    return out.stat().st_size if out.exists() else 0


@contextmanager
def target(
    out: Path, python: str, *, steps: int, pause_s: float, kind: str = "plain", listens: bool = False
) -> Generator[subprocess.Popen[bytes]]:
    prefix = [sys.executable, "-m", "mxprobe", "run", "--"] if listens else []
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_RANKS.get(kind, 1)}"]
    source = [str(TARGETS), kind] if _has_torch(python) else ["-c", STDLIB_TARGET]
    source = [*launcher, *source] if kind in N_RANKS else source
    command = [*prefix, python, *source, str(out), str(steps), str(pause_s)]
    # Of their own session: what a launcher has started goes with it.
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pids_of(process: subprocess.Popen[bytes], outs: Sequence[Path]) -> list[int]:
    files = [Path(f"{out}.pid") for out in outs]
    return [int(file.read_text()) for file in files] if all(file.exists() for file in files) else [process.pid]


def _has_torch(python: str) -> bool:
    question = "import importlib.util as u; raise SystemExit(u.find_spec('torch') is None)"
    return subprocess.run([python, "-c", question], check=False).returncode == 0


def version_of(python: str) -> str:
    question = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()


def other_pythons() -> list[str]:
    """One interpreter of each other minor version, 3.9 or newer, that pyenv has installed here."""
    found: dict[str, str] = {}
    for path in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")):
        minor = ".".join(version_of(str(path)).split(".")[:2])
        if int(minor.split(".")[1]) >= 9 and minor != f"3.{sys.version_info.minor}":
            found[minor] = str(path)
    return list(found.values())


def ways(python: str) -> list[str]:
    """The ways in that are measured on another Python."""
    return ["ptrace", *(["remote_exec"] if version_of(python).split(".") >= ["3", "14"] else [])]


def has_statement(pid: int) -> bool:
    """True if a page of the process begins with an injected statement."""
    beginning = BEGINNING.encode()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return any(
            os.pread(memory.fileno(), len(beginning), address) == beginning
            for mapping in read_maps(pid)
            if mapping.permissions == "rw-p" and not mapping.path and mapping.end - mapping.start <= 64 * PAGE_BYTES
            for address in range(mapping.start, mapping.end, PAGE_BYTES)
        )


def cycle(pids: Sequence[int], trace: Path, result: Result) -> None:
    config = AgentConfig(every=5, weights_every=20, step_timeout_s=60.0, torch_wait_s=0.0)
    options = AttachOptions(trace, config, duration_s=ATTACHED_S, via=result.mechanism)
    processes = {f"rank {rank}": look_up(pid) for rank, pid in enumerate(pids)}
    try:
        Group(processes, options, Progress(io.StringIO())).run()
    except AttachError as error:
        result.refused += 1
        print(error, file=sys.stderr)
        return
    facts = json.loads((trace / "run.json").read_text())
    result.refused += len(facts.get("refused", ()))
    for each in facts["ranks"]:
        if result.mechanism in ("ptrace", "gdb"):
            result.stopped_ms += [each["pause_ms"], each["unmap_pause_ms"]]
        result.latency_ms.append(each["attach_latency_ms"])


def measure(mechanism: str, cycles: int, python: str = sys.executable, kind: str = "plain") -> Result:
    result = Result(mechanism, kind, version_of(python))
    with tempfile.TemporaryDirectory() as name:
        out, control = Path(name, "attached"), Path(name, "control")
        outs = outs_of(out, kind)
        with target(out, python, steps=-1, pause_s=0.005, kind=kind, listens=mechanism == "listener") as process:
            for _ in range(10):  # importing takes its time
                if wait_for_steps(process, outs, 5):
                    break
            pids = pids_of(process, outs)
            for number in range(cycles):
                cycle(pids, Path(name, f"{number}.mxprobe"), result)
                result.cycles += 1
                if not wait_for_steps(process, outs, 3):
                    result.crashed += process.poll() is not None
                    result.stuck += process.poll() is None
                    break
                result.left += sum(map(has_statement, pids))
            Path(f"{out}.stop").touch()
            if not result.stuck:
                process.wait()
        seen = lines_of(outs)
        result.steps = len(seen[0]) - 1
        with target(control, python, steps=result.steps, pause_s=0.0, kind=kind) as process:
            process.wait()
        ended = all(lines and lines[-1].startswith("end ") for lines in seen)
        result.identical = ended and len(seen[0]) > cycles and lines_of(outs_of(control, kind)) == seen
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mechanism", choices=MECHANISMS)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the target")
    parser.add_argument("--target", choices=KINDS, default="plain", help="the job")
    parser.add_argument("--every-target", action="store_true", help="by ptrace to each kind of job")
    parser.add_argument("--all", action="store_true", help="everything that the page on overhead shows")
    parser.add_argument("--json", action="store_true", help="print every number instead of rows")
    options = parser.parse_args()
    if options.all + options.every_target + bool(options.mechanism) != 1:
        parser.error("one of --mechanism, --all and --every-target")
    plan = [(options.mechanism, options.cycles, options.python, options.target)]
    if options.every_target:
        plan = [("ptrace", min(options.cycles, 50), sys.executable, kind) for kind in KINDS]
    if options.all:
        plan = [
            (mechanism, options.cycles, sys.executable, "plain")
            for mechanism in MECHANISMS
            if mechanism != "remote_exec"
        ]
        plan.append(("ptrace", options.cycles, sys.executable, "moe"))
        plan += [
            (mechanism, min(options.cycles, 50), python, "plain")
            for python in other_pythons()
            for mechanism in ways(python)
        ]
    if not options.json:
        print(HEADER)
    for each in plan:
        result = measure(*each)
        print(json.dumps(asdict(result)) if options.json else result.row, flush=True)


if __name__ == "__main__":
    main()
