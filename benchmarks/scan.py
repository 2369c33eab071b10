"""How fast a scan is, end to end, against the decomposition alone; and its peak memory, on a synthetic checkpoint.

    python benchmarks/scan.py [--parameters 3e9] [--dtype bf16] [--whatif] [--directory DIR]

Writes a sharded bf16 checkpoint of Linear weights (2 bytes a parameter on the disk, removed afterwards), scans it in
a process of its own and prints a markdown row: elements per second of the scan (each weight is decomposed twice, once
per direction), the speed of `mxprobe_kernels.decompose` on one slab in memory, their ratio, the same ratio per second
of processor time (all threads, reading included), which a busy machine disturbs less, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTH = 4096
PARAMETERS_PER_SHARD = 500_000_000

_SCAN = """
import re, sys, time
from pathlib import Path
from mxprobe.scan.scanner import scan
from mxprobe.scan.settings import ScanSettings
started, busy = time.perf_counter(), time.process_time()
settings = ScanSettings() if sys.argv[3] == "whatif" else ScanSettings(whatifs=())
result = scan(Path(sys.argv[1]), Path(sys.argv[2]), settings)
seconds, busy = time.perf_counter() - started, time.process_time() - busy
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(result.n_scanned, seconds, busy, peak)
"""


def write_checkpoint(directory: Path, n_parameters: int, dtype: torch.dtype) -> int:
    """A directory of shards and their index; returns the number of parameters."""
    n_rows = 4 * WIDTH
    n_weights = max(round(n_parameters / (n_rows * WIDTH)), 1)
    if n_weights == 1:
        n_rows = max(n_parameters // WIDTH, 32)
    generator = torch.Generator().manual_seed(0)
    one = (torch.randn(n_rows, WIDTH, generator=generator) * 0.02).to(dtype)
    per_shard = max(PARAMETERS_PER_SHARD // one.numel(), 1)
    weight_map: dict[str, str] = {}
    for first in range(0, n_weights, per_shard):
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(first, min(first + per_shard, n_weights))]
        shard = f"model-{first // per_shard:05d}.safetensors"
        save_file({name: one.roll(i, 0) for i, name in enumerate(names)}, directory / shard)
        weight_map |= dict.fromkeys(names, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return n_weights * one.numel()


def kernel_speed(dtype: torch.dtype, seconds: float = 5.0) -> tuple[float, float]:
    """Elements of `decompose` per second and per second of processor time, both directions, as the scan has it."""
    from mxprobe.scan.weight_error import SLAB_ELEMENTS
    from mxprobe_kernels import decompose

    x = (torch.randn(SLAB_ELEMENTS // WIDTH, WIDTH) * 0.02).to(dtype)
    decompose(x)
    n_passes = 0
    started, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        decompose(x, dim=-1)
        decompose(x, dim=0)
        n_passes += 2
    n = n_passes * x.numel()
    return n / (time.perf_counter() - started), n / (time.process_time() - busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=float, default=3e9)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--whatif", action="store_true", help="score the default corrections as well")
    parser.add_argument("--directory", type=Path, help="where to write the checkpoint; default a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        n = write_checkpoint(directory, int(options.parameters), DTYPES[options.dtype])
        os.sync()  # else the scan shares the machine with what still writes the checkpoint
        before = kernel_speed(DTYPES[options.dtype])
        mode = "whatif" if options.whatif else "plain"
        command = [sys.executable, "-c", _SCAN, str(directory), str(directory / "scan.mxprobe"), mode]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        after = kernel_speed(DTYPES[options.dtype])
        kernel, kernel_busy = ((x + y) / 2 for x, y in zip(before, after, strict=True))  # machines drift
        n_weights, seconds, busy, peak_kib = (float(word) for word in finished.stdout.split())
    speed, by_cpu = 2 * n / seconds, 2 * n / busy / kernel_busy
    print("| parameters | dtype | weights | seconds | scan, elem/s | decompose, elem/s | ratio | by CPU | peak |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {n / 1e9:.3g} G | {options.dtype} | {n_weights:.0f} | {seconds:.1f} | {speed / 1e6:.1f} M "
        f"| {kernel / 1e6:.1f} M | {speed / kernel:.2f} | {by_cpu:.2f} | {peak_kib / 1024:.0f} MiB |"
    )


if __name__ == "__main__":
    main()
