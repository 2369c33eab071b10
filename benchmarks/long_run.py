"""What a week of the default schedule takes on disk, through the real writer. Prints the table in docs/long-runs.md.

    python benchmarks/long_run.py [--step-s 30] [--modules 200] [--ranks 64] [--max-trace 2e9]

Ranks share nothing, so one is written, under its share of the limit, and counted `--ranks` times. Values are random:
they compress worse than a run's. Rows per probed step and module are those of a dense transformer attached with the
default options: six operands (weights every fourth probe), a what-if each for every correction, two outputs, blocks,
gradients, and the sensitivity replay.
"""

import argparse
import contextlib
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mxprobe.protocol import AgentConfig
from mxprobe.schema import CODE_BINS, DELTA_BINS, Role
from mxprobe.tables import TABLES, THINNED
from mxprobe.trace import Retention, TraceWriter, open_trace

WEEK_S = 7 * 24 * 3600
CONFIG = AgentConfig()
COMPONENTS = ("total", "scale", "deadzone", "grid")


class Rows:
    """Batches of one table with random numbers in every column that is not a name."""

    def __init__(self, modules: list[str], generator: np.random.Generator) -> None:
        self._modules = modules
        self._generator = generator

    def of(self, table: str, step: int, **names: list[str]) -> dict[str, Any]:
        """Every module with every combination of the names, which are given side by side."""
        each = len(next(iter(names.values())))
        n = each * len(self._modules)
        columns: dict[str, Any] = {}
        for column, kind in TABLES[table]:
            if column in names:
                columns[column] = names[column] * len(self._modules)
            elif column == "module":
                columns[column] = [module for module in self._modules for _ in range(each)]
            elif column == "step":
                columns[column] = [step] * n
            elif column == "time_ns":
                columns[column] = [step * 10**9] * n
            elif kind == "dict":
                columns[column] = [{"format": "mxfp4", "rule": "rceil"}.get(column, "")] * n
            elif kind == "bool":
                columns[column] = [True] * n
            elif kind == "float64":
                columns[column] = self._generator.standard_normal(n)
            elif kind.startswith("list"):
                width = {"delta_hist": DELTA_BINS, "code_hist": CODE_BINS}[column]
                columns[column] = list(self._generator.poisson(8000, (n, width)))
            elif column in ("micro_step", "probe", "weight_lag"):
                columns[column] = [0] * n
            else:
                columns[column] = self._generator.integers(0, 2**18, n)
        return columns


def probed_step(rows: Rows, step: int) -> list[tuple[str, dict[str, Any]]]:
    """The batches of one probed step."""
    has_weights = step % CONFIG.weights_every == 0
    weights = (Role.W_FWD, Role.W_DGRAD)
    operands = [(str(role), "train") for role in Role if role not in weights or has_weights]
    operands += [(str(Role.X_FWD), "rollout")]
    roles, phases = [list(each) for each in zip(*operands, strict=True)]
    whatifs = CONFIG.whatifs
    with_whatif = {
        "role": [role for role in roles for _ in whatifs],
        "phase": [phase for phase in phases for _ in whatifs],
        "correction": list(whatifs) * len(roles),
    }
    recipes = {"recipe_x": ["mxfp4+rceil"] * 2, "recipe_w": ["mxfp4+rceil"] * 2}
    gemms = {"gemm": ["wgrad"] * 4 + ["dgrad"] * 4, "component": list(COMPONENTS) * 2}
    found = [
        ("tensors", rows.of("tensors", step, role=roles, phase=phases)),
        ("whatif", rows.of("whatif", step, **with_whatif)),
        ("outputs", rows.of("outputs", step, phase=["train", "rollout"], **recipes)),
        ("blocks", rows.of("blocks", step, role=roles, phase=phases)),
        ("gradients", rows.of("gradients", step, **gemms)),
    ]
    if CONFIG.sensitivity_every and step % CONFIG.sensitivity_every == 0:
        forward = {"role": ["x_fwd"] * 4 + ["w_fwd"] * 4, "component": list(COMPONENTS) * 2}
        found.append(("sensitivity", rows.of("sensitivity", step, **forward)))
    if has_weights:
        found.append(("updates", rows.of("updates", step, format=["mxfp4"])))
    return found


def size_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # put together meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def write(directory: Path, modules: list[str], steps: range, max_bytes: int | None) -> dict[str, float]:
    """Seconds in `append`, the longest of them, and the largest size on the way."""
    rows = Rows(modules, np.random.default_rng(0))
    spent, longest, largest = 0.0, 0.0, 0
    with TraceWriter(directory, {}, retention=Retention(max_bytes=max_bytes)) as writer:
        for step in steps:
            batches = probed_step(rows, step) if step % CONFIG.every == 0 else []
            timing = {"step_ns": [10**9 + step], "probe_ns": [10**6 + step], "sent_bytes": [step]}
            batches.append(("overhead", {"step": [step], "time_ns": [step * 10**9], "probed": [not batches], **timing}))
            for table, columns in batches:
                started = time.perf_counter()
                writer.append(table, columns)
                took = time.perf_counter() - started
                spent, longest = spent + took, max(longest, took)
            if step % CONFIG.every == 0:
                largest = max(largest, size_of(directory))
    return {"append_s": spent, "longest_append_s": longest, "largest_bytes": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-s", type=float, default=30.0, help="wall-clock time of an optimizer step")
    parser.add_argument("--modules", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--max-trace", type=float, default=2e9)
    options = parser.parse_args()
    modules = [f"model.layers.{i // 7}.mlp.proj_{i % 7}" for i in range(options.modules)]
    n_steps = int(WEEK_S / options.step_s)
    with tempfile.TemporaryDirectory() as base:
        few = range(2 * CONFIG.weights_every)
        write(Path(base) / "few", modules, few, None)
        per_probe = size_of(Path(base) / "few") / (len(few) / CONFIG.every)
        rows = sum(len(open_trace(Path(base) / "few").table(table, ("step",))) for table in THINNED)
        started = time.perf_counter()
        week = Path(base) / "week"
        found = write(week, modules, range(n_steps), int(options.max_trace / options.ranks))
        took = time.perf_counter() - started
        size = size_of(week)
        trace = open_trace(week)
        windows = trace.run.get("thinned", {"starts": [], "until": 0})
        rows_kept = trace.table("tensors", ("step", "n_steps"))
        full = rows_kept[rows_kept["step"] >= windows["until"]]["step"].nunique()
        summed = int(trace.table("outputs", ("n_steps",))["n_steps"].sum())
    n_probes = n_steps // CONFIG.every + 1
    assert summed == 2 * n_probes * len(modules), "a step is missing"
    gigabyte = options.ranks / 1e9
    print(
        f"{options.modules} modules, {options.ranks} ranks, steps of {options.step_s:g} s: "
        f"{n_steps} steps a week, {n_probes} probed"
    )
    print(f"rows per probed step and rank                  {rows / (len(few) / CONFIG.every):12,.0f}")
    print(f"Parquet per probed step, one rank              {per_probe / 1e6:12.2f} MB")
    print(f"a week at full resolution, all ranks           {per_probe * n_probes * gigabyte:12.1f} GB")
    print(f"a week with --max-trace {options.max_trace / 1e9:g}GB, all ranks          {size * gigabyte:12.2f} GB")
    print(f"  the most on the way                          {found['largest_bytes'] * gigabyte:12.2f} GB")
    print(f"  windows, then steps at full resolution       {len(windows['starts']):6d}, {full:4d}")
    print(f"  time in append, of all                       {found['append_s'] / took:12.1%} of {took:.0f} s")
    print(f"  longest append                               {found['longest_append_s']:12.2f} s")
    resident_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"largest resident memory of the writer          {resident_gb:12.2f} GB")


if __name__ == "__main__":
    main()
