"""Elements per second of every backend, and of what a user could run instead.

    python benchmarks/kernels.py [--rows 4096] [--columns 4096] [--threads 2] [--repeats 7] [--device cpu]
                                 [--dtype bfloat16] [--rule rceil] [--ours | --formats]

Best wall time of the repeats, and CPU time where the machine is shared (two columns tell contention apart). `eager`
is the decomposition written in whole-tensor torch operations; `compiled` is torch.compile of the same function;
`numba` is one pass written by hand; `torchao` and `compressed-tensors` quantize to MXFP4 and back, which is a part of
the work (no decomposition). A peer that is not installed is left out. On a CPU both ratios are of rates per CPU second.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial

import numba_peer
import torch

from mxprobe_kernels import cpu_backend, decompose, lite
from mxprobe_kernels.formats import FORMATS, MXFP4, Rule

EAGER = "eager (float32, whole tensor, eight sums)"


def eager_statistics(x: torch.Tensor) -> torch.Tensor:
    """The eight energies of an `rceil` decomposition of [R, K], K a multiple of 32: whole-tensor float32 torch."""
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    bits = amax.view(torch.int32)
    exponent = ((bits + 0x3FFFFF) >> 23) - 129
    scale, ideal = torch.exp2(exponent.float()), amax / 6
    q, q_star = _round(blocks / scale) * scale, _round(blocks / ideal) * ideal
    e, e_scale, e_star = q - blocks, q - q_star, q_star - blocks
    on_d = (q_star == 0) & (blocks != 0)
    dz, grid = torch.where(on_d, e_star, 0.0), torch.where(on_d, 0.0, e_star)
    zeroed = (q == 0) & (blocks != 0)
    products = (blocks * blocks, e * e, e_scale * e_scale, dz * dz, grid * grid, e_scale * grid, blocks * q, zeroed)
    return torch.stack([p.sum(dtype=torch.float64) for p in products])


def _round(z: torch.Tensor) -> torch.Tensor:
    a = z.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign((torch.round(a / step) * step).clamp(max=6.0), z)


def torchao_round_trip() -> Callable[[torch.Tensor], torch.Tensor] | None:
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    except ImportError:
        return None

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        mode = ScaleCalculationMode.RCEIL
        return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, mode).dequantize(x.dtype)

    return round_trip


def compressed_tensors_round_trip() -> Callable[[torch.Tensor], torch.Tensor] | None:
    try:
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
        from compressed_tensors.quantization.utils import calculate_qparams
    except ImportError:
        return None
    arguments = PRESET_SCHEMES["MXFP4"]["weights"]

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, arguments.group_size))
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        return fake_quantize(x, scale, zero_point, arguments)

    return round_trip


def contenders(
    device: str, dtype: torch.dtype, rule: Rule, ours: bool
) -> Iterator[tuple[str, Callable[[torch.Tensor], object]]]:
    """The memory first and `eager` second: what the others are compared with."""
    if device == "cpu":
        yield "memory read", lambda x: x.view(torch.int64).sum()
    else:
        yield "device copy", lambda x: x.clone()
    if not ours:
        yield EAGER, eager_statistics
    if device == "cpu":
        for isa in cpu_backend.isas():
            for name, dim in (("rows", 1), ("columns", 0)):
                yield (
                    f"cpu {isa} {name}",
                    lambda x, isa=isa, dim=dim: cpu_backend.decompose(x, MXFP4, rule, dim, isa=isa),
                )
            yield f"cpu {isa} lite", partial(cpu_backend.lite, format=MXFP4, rule=rule, dim=1, isa=isa)
    else:
        yield "triton rows", lambda x: decompose(x, rule=rule, backend="triton")
        yield "triton columns", lambda x: decompose(x, rule=rule, backend="triton", dim=0)
        yield "triton lite", lambda x: lite(x, rule=rule, backend="triton")
    if ours:
        return
    yield "torch (float64, chunked)", partial(decompose, rule=rule, backend="torch")
    yield "compiled eager (eight sums)", torch.compile(eager_statistics)
    for histograms, what in ((False, "numba (ten sums, two counts)"), (True, "numba (the same, both histograms)")):
        by_numba = numba_peer.statistics(histograms) if dtype != torch.float16 else None
        if by_numba is not None:
            yield what, by_numba
    round_trip = torchao_round_trip()
    if round_trip is not None:
        yield "torchao `to_mx` round trip (no sums)", round_trip
        yield "compiled torchao round trip (no sums)", torch.compile(round_trip)
    round_trip = compressed_tensors_round_trip()
    if round_trip is not None:
        yield "compressed-tensors round trip (no sums)", round_trip


def formats(device: str, rule: Rule) -> Iterator[tuple[str, Callable[[torch.Tensor], object]]]:
    """Every format by our own kernel and by the torch path."""
    fast = "cpu" if device == "cpu" else "triton"
    for name in FORMATS:
        for backend in (fast, "torch"):
            yield f"{name} {backend}", partial(decompose, format=name, rule=rule, backend=backend)


def best_seconds(run: Callable[[], object], repeats: int, device: str) -> tuple[float, float]:
    """Best wall and best CPU seconds of `repeats` runs, after one to warm up."""
    run()
    wall, cpu = float("inf"), float("inf")
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        wall = min(wall, time.perf_counter() - begin)
        cpu = min(cpu, time.process_time() - begin_cpu)
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rule", choices=[rule.value for rule in Rule], default="rceil", help="of our kernels")
    parser.add_argument("--ours", action="store_true", help="leave out eager and the peers")
    parser.add_argument("--formats", action="store_true", help="every format instead, by our kernel and by torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(arguments.rows, arguments.columns, generator=g)
        .to(getattr(torch, arguments.dtype))
        .to(arguments.device)
    )
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__},")
    shape = f"[{arguments.rows}, {arguments.columns}] on {arguments.device}"
    print(f"{arguments.dtype} {shape}, load average {load:.1f} at start\n")
    print("| what | Gelem/s | Gelem/s per CPU second | times eager | share of read bandwidth |")
    print("|---|---|---|---|---|")
    rates: dict[str, tuple[float, float]] = {}
    unit = 1 if arguments.device == "cpu" else 0
    rule = Rule(arguments.rule)
    what = (
        formats(arguments.device, rule)
        if arguments.formats
        else contenders(arguments.device, x.dtype, rule, arguments.ours)
    )
    for name, run in what:
        wall, cpu = best_seconds(lambda run=run: run(x), arguments.repeats, arguments.device)
        rates[name] = rate = (x.numel() / wall / 1e9, x.numel() / cpu / 1e9)
        times_eager = f"{rate[unit] / rates[EAGER][unit]:.1f}" if EAGER in rates else ""
        row = f"{rate[0]:.3f} | {rate[1]:.3f} | {times_eager} | {rate[unit] / next(iter(rates.values()))[unit]:.3f}"
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
