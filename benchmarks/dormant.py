"""What operators planted by `mxprobe run --plant-probes` cost a compiled model while nothing is probed.

    python benchmarks/dormant.py [--rounds 8] [--steps 6] [--tokens 512] [--width 512]

The model of `benchmarks/overhead.py` (25 Linears) is compiled by inductor in two processes, one of them started with
`--plant-probes`; they train in turns of a few steps, the other stopped, so that a drift of the machine strikes both.
Printed are the CPU time of the main thread per step, the ratio of turns that follow each other, with Student's 95 %
interval, and before that what the two operators of a Linear take by themselves, which bounds what a host that only
queues work for a GPU would see.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead import TARGET, Target, interval

_MODEL, _TRAINING = TARGET.split("optimizer =")
COMPILED = f"{_MODEL}model = torch.compile(model)\noptimizer ={_TRAINING}"
PLANT = ["--plant-probes"]
# The best of several loops: a call has no noise below it.
CALLS = """
import timeit
import torch
torch.set_num_threads(1)
x, w = torch.zeros(8, 8), torch.zeros(8, 8)
observe, observe_gradient = torch.ops.mxprobe.observe.default, torch.ops.mxprobe.observe_gradient.default
seconds = min(timeit.repeat(lambda: observe_gradient(x, observe(x, w, x)), number=5000, repeat=7)) / 5000
print(f"both operators of a Linear: {1e6 * seconds:.1f} us")
"""


def job(options: list[str], program: str, *arguments: str) -> list[str]:
    """The command that runs a program under `mxprobe run`."""
    return [sys.executable, "-m", "mxprobe", "run", *options, "--", sys.executable, "-c", program, *arguments]


def start(out: Path, command: list[str]) -> Target:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return Target(subprocess.Popen(command, env=environ), out)


def turn(target: Target, n_steps: int) -> float:
    """CPU seconds per step of a stopped process, which is let go on for so many, and stopped again."""
    with target.going():
        last = target.wait_for(n_steps)
    steps = target.steps()
    return statistics.median(steps[step][0] for step in range(last - n_steps + 1, last + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    options = parser.parse_args()
    subprocess.run(job(PLANT, CALLS), check=True)
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name, flags in (("without", []), ("planted", PLANT)):
                out = Path(directory, name)
                targets.append(start(out, job(flags, COMPILED, str(out), str(options.tokens), str(options.width), "0")))
                turn(targets[-1], 3)  # compiles
            before = os.getloadavg()[0]
            turns = [tuple(turn(target, options.steps) for target in targets) for _ in range(options.rounds)]
        finally:
            for target in targets:
                target.process.kill()
                target.process.wait()
    for name, seconds in zip(("without", "planted"), zip(*turns, strict=True), strict=True):
        print(f"{name}: {1e3 * statistics.median(seconds):.1f} ms of CPU time a step, median of {len(turns)} turns")
    print(f"planted against without: {interval([planted / plain - 1 for plain, planted in turns])}")
    print(f"load average {before:.1f} to {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
