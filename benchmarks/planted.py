"""Planted faults with known answers, as many fresh draws as you like: how often are they named right?

    python benchmarks/planted.py tensors [--draws 200] [--first 1000]    one tensor each, by `mxprobe.diagnose`
    python benchmarks/planted.py runs [--draws 10] [--first 1000]        recorded runs of a small language model

`--first` is the first seed: those of the tests begin at 0. Beside each share stands the lower end of its one-sided 95 %
interval (Clopper-Pearson). Of `runs`, each draw is one run per kind of fault, in all layers and in a random half; the
last column counts wrong components, and runs in which the median Linear alone would be over the gate of the mismatch.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from math import comb
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mxprobe import diagnose
from mxprobe.attribution import Thresholds, recommend
from mxprobe.attribution.measured import measure
from mxprobe.attribution.symptom import mismatch
from mxprobe.diagnosis import UNDECIDED, Diagnosis
from mxprobe.trace import open_trace
from mxprobe_kernels import decompose
from tests.planted import (
    EXPECTED,
    Plant,
    deadzone_only,
    drift_share,
    drifted_scale,
    gradient_scale_only,
    grid_only,
    mixed_by_energy,
    scale_only,
)
from tests.planted_lm import EXTENTS, KINDS, is_right, names_a_wrong_component, write_planted

MIXES: dict[str, tuple[Plant, Plant, str]] = {
    "scale .8, grid .2": (scale_only, grid_only, "scale"),
    "scale .8, deadzone .2": (scale_only, deadzone_only, "scale"),
    "deadzone .8, grid .2": (deadzone_only, grid_only, "deadzone"),
    "deadzone .8, scale .2": (deadzone_only, scale_only, "deadzone"),
    "grid .8, deadzone .2": (grid_only, deadzone_only, "grid"),
    "grid .8, scale .2": (grid_only, scale_only, "grid"),
}
DRIFTS = (0.1, 0.2, 0.4, 0.6, 1.2)


def lower_bound(right: int, n: int) -> float:
    """Of the one-sided 95 % Clopper-Pearson interval, by bisection."""
    low, high = 0.0, right / n
    for _ in range(40):
        p = (low + high) / 2
        above = sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(right, n + 1))
        low, high = (p, high) if above < 0.05 else (low, p)
    return low


def print_row(name: str, right: int, n: int, remark: str = "") -> None:
    print(f"| {name} | {right} of {n} | {lower_bound(right, n):.3f} | {remark} |", flush=True)


def tensors(draws: int, first: int) -> None:
    print("| planted | right | at least | named |\n|---|---|---|---|")
    for name, expected in EXPECTED.items():

        def right(found: Diagnosis, expected=expected) -> bool:
            wanted = expected.corrections or {"none"}
            named = found.candidates[:1] if found.correction == UNDECIDED else (found.correction,)
            return found.component == expected.component and named[0] in wanted

        judge(name, expected.plant, expected.rule, right, draws, first)
    judge("scale, in a gradient of tokens of many sizes", gradient_scale_only, "rceil", is_scale, draws, first)
    for drift in DRIFTS:
        drifted(drift, draws, first)
    for name, (one, other, component) in MIXES.items():
        plant = mixed_by_energy(one, other, 0.8, lambda x: decompose(x).sum_e2)
        judge(name, plant, "rceil", lambda found, component=component: found.component == component, draws, first)


def is_scale(found: Diagnosis) -> bool:
    named = found.candidates[:1] if found.correction == UNDECIDED else (found.correction,)
    return found.component == "scale" and named[0] in EXPECTED["scale_only"].corrections


def drifted(drift: float, draws: int, first: int) -> None:
    """Two faults: right is the one with more than .6 of the energy, either one between, or neither."""
    named: Counter[str] = Counter()
    n_right = 0
    for seed in range(first, first + draws):
        x = drifted_scale(32, 256, torch.Generator().manual_seed(seed), drift=drift)
        found, moved = diagnose(x), drift_share(x)
        named[str(found.component)] += 1
        allowed = {"mixed"} | ({"scale"} if moved < 0.6 else set()) | ({"grid"} if moved > 0.4 else set())
        n_right += str(found.component) in allowed
    said = ", ".join(f"{text} {n}" for text, n in named.most_common())
    print_row(f"grid of an earlier scale, moved since by {drift:g} of it", n_right, draws, said)


def judge(name: str, plant: Plant, rule: str, right: Callable[[Diagnosis], bool], draws: int, first: int) -> None:
    named: Counter[str] = Counter()
    n_right = 0
    for seed in range(first, first + draws):
        shape = random.Random(seed)
        rows, k = shape.choice((16, 32, 64)), shape.choice((128, 256, 512))
        found = diagnose(plant(rows, k, torch.Generator().manual_seed(seed)), rule=rule)
        n_right += right(found)
        named[f"{found.component}: {' or '.join(found.candidates) or found.correction}"] += 1
    print_row(name, n_right, draws, ", ".join(f"{text} {n}" for text, n in named.most_common(3)))


def runs(draws: int, first: int) -> None:
    thresholds = Thresholds().replace(n_resamples=20)
    right, n, wrong_component, by_median = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    said: list[str] = []
    began = time.perf_counter()
    for seed in range(first, first + draws):
        for kind in KINDS:
            for extent in EXTENTS:
                with tempfile.TemporaryDirectory() as directory:
                    trace, planted = write_planted(Path(directory) / "t", kind, extent=extent, seed=seed)
                    answer = recommend(open_trace(trace), thresholds)
                    found = measure(open_trace(trace))
                    seen = mismatch(found, np.ones(found.n_clusters))
                place = f"{kind}, {extent}"
                over = seen.per_module[np.isfinite(seen.per_module)]
                by_median[place] += bool(np.median(over) > seen.gate(thresholds))
                n[place] += 1
                right[place] += is_right(kind, answer, planted)
                wrong_component[place] += names_a_wrong_component(kind, answer)
                if not is_right(kind, answer, planted):
                    said.append(f"{place}, seed {seed}: {answer.headline}")
                    print(said[-1], file=sys.stderr, flush=True)
    print("| planted | right | at least | wrong component, symptom by the plain median |\n|---|---|---|---|")
    for place in n:
        print_row(place, right[place], n[place], f"{wrong_component[place]}, {by_median[place]}")
    print_row("all", right.total(), n.total(), f"{wrong_component.total()}, {by_median.total()}")
    print(f"\n{time.perf_counter() - began:.0f} s. Not right:\n" + "\n".join(said or ["none"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tensors", "runs"))
    parser.add_argument("--draws", type=int)
    parser.add_argument("--first", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    what, default = {"tensors": (tensors, 200), "runs": (runs, 10)}[arguments.what]
    what(arguments.draws or default, arguments.first)


if __name__ == "__main__":
    main()
