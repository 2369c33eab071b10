"""Does a step cost what it did before, once mxprobe has detached?

    python benchmarks/after_detach.py                                       steps of .4 s
    python benchmarks/after_detach.py --width 64 --tokens 128 --turn 0.1    steps of some milliseconds

Two processes train the same model on one core, by turns: while one runs, the other is stopped, so that a drift of the
machine meets both. Then mxprobe attaches to the first, probes it and detaches, so many times, and they take turns
again. What a step of the first takes longer than one of the second, in CPU time of the main thread, after less before,
is the cost that stayed: of each pair of processes

    log(first / second, after) - log(first / second, before)

by medians of steps. The interval is Student's t over the pairs. `--attaches 0` shows what the machine itself makes of
it.

A step's speed depends on where its tensors lie. A process that has only ever taken steps of one length has its heap in
the best of orders, and whatever else it does makes its steps slower from then on: an attach (`--uneven 0`) as well as
steps of other lengths without mxprobe (`--uneven 0 --attaches 0 --then-uneven`). So both processes take steps of many
lengths first, as RL does. And the C library's allocator is kept from learning in both, without `--libc`: it stops to
give large buffers back to the system once it has seen one freed, ours or the job's, and steps become faster.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from overhead import WIDTH, Target, interval, mxprobe, running_model

ATTACHED_S = 10.0
FIXED_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""Without these glibc gives large buffers back to the system until one as large has been freed, then keeps them."""
WARM_UP_S = 3.0


def take_turns(targets: tuple[Target, Target], turns: int, turn_s: float) -> float:
    """Log of the first's step over the second's: both are stopped before and after."""
    firsts = [max(target.steps(), default=0) + 1 for target in targets]
    for _ in range(turns):
        for target in targets:
            with target.going():
                time.sleep(turn_s)
    seconds = [
        statistics.median(cpu_s for step, (cpu_s, _) in target.steps().items() if step >= first)
        for target, first in zip(targets, firsts, strict=True)
    ]
    return math.log(seconds[0] / seconds[1])


def run_for(target: Target, seconds: float, attaches: int = 0, *, uneven: bool = False) -> None:
    """Let it go on, attach and detach so many times, and stop it again. `uneven`: it takes steps of other lengths."""
    pid = str(target.process.pid)
    with target.going(), tempfile.TemporaryDirectory() as name:
        if uneven:
            target.process.send_signal(signal.SIGUSR1)
            target.wait_for(2)
        for number in range(attaches):
            mxprobe("attach", pid, "-o", str(Path(name, f"{number}.mxprobe")), "--background", "--every", "5")
            time.sleep(ATTACHED_S)
            mxprobe("detach", pid)
        time.sleep(seconds)


@dataclass(frozen=True)
class Pair:
    cost: float
    """Share of a step that stayed."""
    n_steps: int
    """That both took by turns."""
    n_attached: int
    """That the first took in between."""


def measure(options: argparse.Namespace, core: int) -> Pair:
    environment = {} if options.libc else FIXED_ALLOCATOR
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                running_model(options.tokens, options.width, n_uneven=options.uneven, environment=environment)
            )[0]
            for _ in range(2)
        )
        for target in (first, second):
            os.sched_setaffinity(target.process.pid, {core})
            run_for(target, WARM_UP_S)
        began = max(first.steps()) + max(second.steps())
        before = take_turns((first, second), options.turns, options.turn)
        between = max(first.steps())
        run_for(first, WARM_UP_S, options.attaches, uneven=options.then_uneven)
        n_attached = max(first.steps()) - between
        after = take_turns((first, second), options.turns, options.turn)
        n_steps = max(first.steps()) + max(second.steps()) - began - n_attached
        return Pair(math.expm1(after - before), n_steps, n_attached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    parser.add_argument("--turns", type=int, default=30, help="of each process, before and after")
    parser.add_argument("--turn", type=float, default=1.0, help="seconds")
    parser.add_argument("--attaches", type=int, default=3, help="between")
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model")
    parser.add_argument("--uneven", type=int, default=150, help="steps of other lengths before")
    parser.add_argument("--then-uneven", action="store_true", help="60 more of them between, in the first process")
    parser.add_argument("--libc", action="store_true", help="leave the allocator as it is")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    print("| pair | steps by turns | steps in between | CPU time of a step, after to before | load average |")
    print("|---|---|---|---|---|", flush=True)
    costs: list[float] = []
    for number in range(options.pairs):
        pair = measure(options, core)
        costs.append(pair.cost)
        load = os.getloadavg()[0]
        print(f"| {number + 1} | {pair.n_steps} | {pair.n_attached} | {pair.cost:+.2%} | {load:.1f} |", flush=True)
    print(f"| mean, 95 % interval | | | {interval(costs)} | |")


if __name__ == "__main__":
    main()
