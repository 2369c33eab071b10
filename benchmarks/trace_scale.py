"""`mxprobe recommend` on a trace of 10^8 rows: seconds and memory by engine. Prints the table in docs/long-runs.md.

    python benchmarks/trace_scale.py [--rows 1e8] [--ranks 64] [--engine arrow duckdb]

One rank is written by the real writer, with the rows of the default schedule (see long_run.py) and outputs of a rollout
that differs from training; the others are hard links to its parts. So the disk holds one rank, but every row is read,
decoded and summed for each.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from long_run import CONFIG, Rows, probed_step

from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, layout, open_trace

MODULES = [f"model.layers.{i // 7}.mlp.proj_{i % 7}" for i in range(200)]


def write_rank(directory: Path, n_probes: int) -> int:
    """Rows written."""
    rows, written = Rows(MODULES, np.random.default_rng(0)), 0
    with TraceWriter(directory, {"config": {"rule": "rceil"}}) as writer:
        n = len(MODULES)
        seen = {"status": ["probed"] * n, "shape": [[4096, 4096]] * n, "gemm_flops": [1e12] * n}
        writer.append("modules", {"module": MODULES, **seen})
        for index in range(n_probes):
            for table, columns in probed_step(rows, index * CONFIG.every):
                for name, kind in TABLES[table]:
                    if kind == "float64" and name.startswith(("sum_", "out_", "ref2", "err2")):
                        columns[name] = np.abs(columns[name])
                if table == "outputs":
                    error = np.tile([0.0, 0.2], len(MODULES)) * columns["ref2"]  # train, rollout
                    columns |= {"realised2": error, "predicted2": error, "residual2": 0.0 * error}
                    columns |= {"recipe_x": ["none", "mxfp4+rceil"] * len(MODULES)}
                    columns |= {"recipe_w": ["none", "mxfp4+rceil"] * len(MODULES)}
                writer.append(table, columns)
                written += len(columns["step"])
    return written


def link_ranks(directory: Path, n_ranks: int) -> None:
    for table in TABLES:
        for part in layout.part_files(directory, table):
            for rank in range(1, n_ranks):
                copy = layout.part_path(directory, table, rank, part.first, part.last)
                copy.parent.mkdir(parents=True, exist_ok=True)
                os.link(part.path, copy)


def recommend(directory: Path, engine: str) -> tuple[float, float, float]:
    """Seconds, processor seconds, and the largest resident memory in GB."""
    command = [sys.executable, "-m", "mxprobe", "recommend", str(directory), "--engine", engine, "--json"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--engine", nargs="+", default=["arrow", "duckdb"])
    options = parser.parse_args()
    per_probe = sum(len(columns["step"]) for _, columns in probed_step(Rows(MODULES, np.random.default_rng(0)), 50))
    n_probes = max(int(np.ceil(options.rows / options.ranks / per_probe)), 2)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as base:
        directory = Path(base) / "run.mxprobe"
        n_rows = write_rank(directory, n_probes) * options.ranks
        link_ranks(directory, options.ranks)
        size = sum(path.stat().st_size for path in directory.rglob("*.parquet"))
        counted = sum(len(open_trace(directory).table(table, ("step",))) for table in ("outputs", "blocks"))
        assert counted % options.ranks == 0
        print(f"{n_rows:,} rows, {options.ranks} ranks, {size / 1e9:.2f} GB read")
        for engine in options.engine:
            seconds, cpu_s, resident_gb = recommend(directory, engine)
            load = os.getloadavg()[0]
            print(
                f"recommend --engine {engine:8s}{seconds:8.1f} s{cpu_s:8.1f} s of processors{resident_gb:8.2f} GB"
                f"   (load {load:.0f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
