"""The report of a large run: size of the file, time and memory to build it, time until a browser can use it.

    python benchmarks/report.py [--steps 2000] [--layers 32] [--keep DIR] [--tiled] [--no-browser]

Writes a trace of 7 GEMMs per layer, 6 operands each, probed at *every* step, with 11 what-ifs per operand (2.7
million tensor rows and 30 million what-ifs by default), in the row groups of a compacted trace, then runs `mxprobe
report` on it in a process of its own. `--tiled` repeats one pattern of values instead of drawing each: files compress
to a tenth, for runs ten times as long than a disk would hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mxprobe.schema import CODE_BINS, DELTA_BINS, SCHEMA_VERSION, Phase, Role
from mxprobe.tables import TABLES
from mxprobe.trace import layout
from mxprobe.trace.arrow import ROWS_PER_PIECE, columns_of, table_schema
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS

KINDS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
METRICS = ("reward_mean", "entropy", "grad_norm", "kl_ref", "clip_ratio", "length_mean", "loss")
ELEMENTS = 32768
CHROMIUM = shutil.which("chromium") or "chromium"

Columns = dict[str, Any]
Generator = np.random.Generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--keep", type=Path, help="put the trace here, or use the one that is here")
    parser.add_argument("--tiled", action="store_true")
    parser.add_argument("--no-browser", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = directory / "large.mxprobe"
        if not (trace / layout.RUN_FILE).exists():
            began = time.perf_counter()
            write_trace(trace, n_layers=options.layers, n_steps=options.steps, tiled=options.tiled)
            print(f"trace: {_megabytes(trace)} MB, written in {time.perf_counter() - began:.0f} s")
        page = directory / "large.html"
        seconds, cpu_seconds, peak_bytes, summary = build(trace, page)
        size = page.stat().st_size / 1e6
        print(
            f"built in {seconds:.1f} s ({cpu_seconds:.1f} s of CPU), at most {peak_bytes / 2**30:.2f} GiB; "
            f"file {size:.2f} MB"
        )
        print(f"probed steps {summary['n_probed_steps']}, displayed in {summary['n_displayed_steps']} bins")
        for problem in summary["problems"]:
            print(f"  {problem}")
        if not options.no_browser:
            print(f"interactive in {interactive_ms(page) / 1000:.1f} s in headless Chromium")


def build(trace: Path, page: Path) -> tuple[float, float, int, dict[str, Any]]:
    """Seconds, seconds of CPU, peak resident bytes and the summary of `mxprobe report`, in a process of its own."""
    command = [sys.executable, "-m", "mxprobe", "report", str(trace), "-o", str(page), "--json"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"mxprobe report ended with {process.returncode}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return time.perf_counter() - began, cpu_seconds, usage.ru_maxrss * 1024, json.loads(printed)


def interactive_ms(page: Path) -> float:
    """Milliseconds from navigation until both heatmaps hold data and another layer's panels are drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1280, "height": 1080})
        tab.goto(page.as_uri())
        tab.wait_for_function("() => ['hurts', 'where'].every(n => document.getElementById('chart-' + n).data)")
        tab.locator("#layer-next").click()
        elapsed = tab.evaluate("performance.now()")
        browser.close()
    return float(elapsed)


def write_trace(directory: Path, *, n_layers: int, n_steps: int, tiled: bool) -> None:
    """The tables as `compact` leaves them: one part per table, groups of 65,536 rows in the order of steps."""
    modules = [f"model.layers.{layer}.{kind}" for layer in range(n_layers) for kind in KINDS]
    n_operands = len(modules) * len(Role)
    steps_per_group = max(ROWS_PER_PIECE // n_operands, 1)
    rng = np.random.default_rng(0)
    run = {"schema_version": SCHEMA_VERSION, "created_ns": 0, "closed_ns": 1, "mxprobe": "benchmark"}
    starts = range(1, n_steps + 1, steps_per_group)
    groups = [np.arange(start, min(start + steps_per_group, n_steps + 1)) for start in starts]
    _write(directory, "tensors", (_tensors(modules, steps, rng, tiled=tiled) for steps in groups))
    whatifs = (_whatif(modules, steps, rng, tiled=tiled) for steps in groups)
    _write(directory, "whatif", (part for whole in whatifs for part in whole))
    _write(directory, "outputs", (_outputs(modules, steps, rng) for steps in groups))
    every = np.arange(1, n_steps + 1)
    _write(directory, "signals", (_signals(every, metric, rng) for metric in METRICS))
    timing = {"probed": np.ones(n_steps, bool), "step_ns": np.full(n_steps, 10**9), "probe_ns": np.full(n_steps, 10**7)}
    _write(directory, "overhead", [{"step": every, "time_ns": every * 10**9, **timing}])
    probed = {"module": modules, "class_name": "Linear", "status": "probed", "gemm_flops": np.full(len(modules), 1e12)}
    _write(directory, "modules", [probed])
    _write(directory, "events", [{"step": [1], "time_ns": [1], "kind": ["attached"], "detail": ["224 modules"]}])
    layout.write_json(directory / layout.RUN_FILE, run)


def _write(directory: Path, table: str, parts: Any) -> None:
    path = layout.part_path(directory, table, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = columns_of(table)
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": [name for name, kind in kinds.items() if kind == "dict"],
        "use_byte_stream_split": [name for name, kind in kinds.items() if kind == "float64"],
    }
    with pq.ParquetWriter(path, table_schema(table), **options) as writer:
        for part in parts:
            writer.write_table(_table(table, part))


def _table(table: str, columns: Columns) -> pa.Table:
    n = max(len(values) for values in columns.values() if not isinstance(values, str))
    arrays: list[Any] = []
    for field in table_schema(table):
        values = columns.get(field.name)
        if isinstance(values, pa.Array):
            arrays.append(values)
        elif isinstance(values, str):
            arrays.append(_coded([values], np.zeros(n, np.int32)))
        elif isinstance(values, np.ndarray) and values.ndim == 2:
            flat = pa.array(values.ravel().astype(np.int64))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
        elif values is None:
            arrays.append(pa.nulls(n, field.type))
        else:
            arrays.append(pa.array(values, type=field.type))
    return pa.table(arrays, schema=table_schema(table))


def _coded(names: list[str], codes: npt.NDArray[Any]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))


def _operand_keys(modules: list[str], steps: npt.NDArray[Any]) -> Columns:
    n_roles = len(Role)
    n = len(steps) * len(modules) * n_roles
    step = np.repeat(steps, len(modules) * n_roles)
    return {
        "step": step,
        "micro_step": np.zeros(n, np.int32),
        "time_ns": step * 10**9,
        "module": _coded(modules, np.tile(np.repeat(np.arange(len(modules)), n_roles), len(steps))),
        "role": _coded([str(role) for role in Role], np.tile(np.arange(n_roles), len(steps) * len(modules))),
        "phase": str(Phase.TRAIN),
        "format": "mxfp4",
        "rule": "rceil",
        "sampled_frac": np.full(n, 0.25),
        "n_clusters": np.full(n, 512),
    }


def _noise(rng: Generator, n: int, n_operands: int, *, tiled: bool) -> npt.NDArray[np.float64]:
    """Factors near 1; tiled, the same for an operand at each step of a group."""
    if not tiled:
        return 0.95 + 0.1 * rng.random(n, dtype=np.float32).astype(np.float64)
    return np.tile(0.95 + 0.1 * rng.random(n_operands, dtype=np.float32).astype(np.float64), n // n_operands)


def _tensors(modules: list[str], steps: npt.NDArray[Any], rng: Generator, *, tiled: bool) -> Columns:
    n_operands = len(modules) * len(Role)
    n = len(steps) * n_operands

    def noise() -> npt.NDArray[np.float64]:
        return _noise(rng, n, n_operands, tiled=tiled)

    x2, nmse, dead, grid = ELEMENTS * noise(), 0.0134 * noise(), 0.025 * noise(), 0.72 * noise()
    e2 = x2 * nmse
    ref2 = 64 * x2
    out2 = ref2 * 0.0135 * noise()
    counts = {name: np.zeros(n, np.int64) for name, kind in TABLES["tensors"] if kind == "int64"}
    floats = {name: np.zeros(n) for name, kind in TABLES["tensors"] if kind == "float64"}
    blocks = np.full((n, DELTA_BINS), ELEMENTS // 32 // DELTA_BINS)
    blocks[:, 1:] += np.diff(rng.integers(0, 9, (n, DELTA_BINS)), axis=1) if not tiled else 0
    return {
        **counts,
        **floats,
        **_operand_keys(modules, steps),
        "n": np.full(n, ELEMENTS),
        "n_blocks": np.full(n, ELEMENTS // 32),
        "n_zeroed": (ELEMENTS * 0.107 * noise()).astype(np.int64),
        "n_deadzone": (ELEMENTS * 0.078 * noise()).astype(np.int64),
        "sum_x2": x2,
        "sum_e2": e2,
        "sum_scale2": 1.7 * e2,
        "sum_dz2": dead * e2,
        "sum_grid2": grid * e2,
        "sum_scale_grid": (e2 * (1 - dead - grid) - 1.7 * e2) / 2,
        "sum_xq": 0.99 * x2,
        "sum_xqstar": 0.99 * x2,
        "sum_e2_on_d": dead * e2 * noise(),
        "sum_e2_zeroed": dead * e2 * noise(),
        "amax": 4 * noise(),
        "delta_hist": blocks,
        "code_hist": np.full((n, CODE_BINS), ELEMENTS // CODE_BINS),
        "out_ref2": ref2,
        "out_e2": out2,
        "out_scale2": 1.7 * out2 * noise(),
        "out_dz2": 0.03 * out2 * noise(),
        "out_grid2": 0.72 * out2 * noise(),
        "out_scale_grid": -0.7 * out2 * noise(),
        "out_zeroed2": 0.03 * out2 * noise(),
    }


def _whatif(modules: list[str], steps: npt.NDArray[Any], rng: Generator, *, tiled: bool) -> Iterator[Columns]:
    """Corrections of an operand are neighbouring rows, as the agent sends them; a group holds part of the steps."""
    n_operands, n_corrections = len(modules) * len(Role), len(DEFAULT_WHATIFS)
    for part in np.array_split(steps, min(n_corrections, len(steps))):
        keys = _operand_keys(modules, part)
        index = pa.array(np.repeat(np.arange(len(part) * n_operands), n_corrections))
        rows = {name: v if isinstance(v, str) else pa.array(v).take(index) for name, v in keys.items()}
        n = len(index)
        left = np.tile(np.linspace(0.1, 1.2, n_corrections), n // n_corrections)
        sums = {
            name: left * level * _noise(rng, n, n_operands * n_corrections, tiled=tiled)
            for name, level in (("sum_e2", 440.0), ("sum_e2_on_d", 11.0), ("out_e2", 28000.0), ("out_zeroed2", 850.0))
        }
        yield {
            **rows,
            **sums,
            "correction": _coded(list(DEFAULT_WHATIFS), np.tile(np.arange(n_corrections), n // n_corrections)),
            "n": np.full(n, ELEMENTS),
            "n_zeroed": (3500 * left).astype(np.int64),
            "out_ref2": 64.0 * ELEMENTS * _noise(rng, n, n_operands * n_corrections, tiled=tiled),
        }


def _outputs(modules: list[str], steps: npt.NDArray[Any], rng: Generator) -> Columns:
    n_phases = 2
    n = len(steps) * len(modules) * n_phases
    step = np.repeat(steps, len(modules) * n_phases)
    is_rollout = np.tile([0, 1], n // n_phases)
    error = np.where(is_rollout, 0.027 * rng.uniform(0.9, 1.1, n), 1e-13)
    return {
        "step": step,
        "micro_step": np.zeros(n, np.int32),
        "time_ns": step * 10**9,
        "module": _coded(modules, np.tile(np.repeat(np.arange(len(modules)), n_phases), len(steps))),
        "phase": _coded([str(Phase.TRAIN), str(Phase.ROLLOUT)], is_rollout),
        "recipe_x": _coded(["none", "mxfp4+rceil"], is_rollout),
        "recipe_w": _coded(["none", "mxfp4+rceil"], is_rollout),
        "exact": np.ones(n, bool),
        "sampled_frac": np.full(n, 0.25),
        "n_rows": np.full(n, 512),
        "ref2": np.full(n, 1000.0),
        "realised2": 1000.0 * error,
        "predicted2": 1000.0 * np.where(is_rollout, error, 0.0),
        "residual2": np.full(n, 1e-9),
    }


def _signals(steps: npt.NDArray[Any], metric: str, rng: Generator) -> Columns:
    values = 1 - np.exp(-steps / steps.size) + 0.05 * rng.standard_normal(steps.size)
    names = {"source": "transformers.Trainer.log", "framework": "trl", "raw_key": metric, "metric": metric}
    return {"step": steps, "time_ns": steps * 10**9, **names, "estimator": "", "value": values}


def _megabytes(directory: Path) -> int:
    return round(sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6)


if __name__ == "__main__":
    main()
