"""The public functions: names resolved, the backend chosen. Shipped.

Rule of choice for `backend="auto"`: Triton on a CUDA or HIP device where triton can be imported; the C++ library on a
CPU where the build found a compiler; else the plain torch path. Every backend yields the same
codes, counts and histograms, and sums within 1e-6 of float64; the torch path is float64 itself. Quantizing, and with
it corrections, go to the C++ library on a CPU for formats of mini-floats with E8M0 or E4M3 scales: the same bits.
Inside a graph of torch.compile call `accumulate`, the same as one operator of torch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from mxprobe_kernels import cpu_backend, torch_backend
from mxprobe_kernels.decomposition import Decomposition
from mxprobe_kernels.formats import MXFP4, Format, Rule, get_format, get_rule
from mxprobe_kernels.lite_statistics import Lite, from_decomposition

BACKENDS = ("auto", "torch", "cpu", "triton")


def decompose(
    x: torch.Tensor,
    *,
    format: str | Format = "mxfp4",
    rule: str | Rule = "rceil",
    dim: int = -1,
    backend: str = "auto",
    enabled: torch.Tensor | None = None,
) -> Decomposition:
    """Decompose the quantization error of x, blocks along `dim` (the contraction axis of the consuming GEMM).

    x: float32, bfloat16, float16 or float64 (rounded to float32), any shape and strides. Blocks with a NaN or an
    infinity are counted and left out. Nothing is copied from the device until a number is read off the result.
    `enabled`: int32 [1] on the device of x; while it holds 0 everything is 0, and the Triton kernels do not read x but
    for its amax, of a format with a scale for the tensor or for squares. ValueError for an unknown format, rule or
    backend, or a tensor that has no such axis.
    """
    record, chosen = get_format(format), get_rule(rule)
    picked = pick_backend(backend, x)
    if picked == "triton":
        from mxprobe_kernels import triton_backend

        return triton_backend.decompose(x, record, chosen, dim, enabled=enabled)
    whole = (cpu_backend if picked == "cpu" else torch_backend).decompose(x, record, chosen, dim)
    if enabled is None:
        return whole
    return Decomposition(torch.where(enabled != 0, whole.values, 0.0), record.name, chosen.value)


def lite(
    x: torch.Tensor,
    *,
    format: str | Format = "mxfp4",
    rule: str | Rule = "rceil",
    dim: int = -1,
    backend: str = "auto",
) -> Lite:
    """Return sum x^2, sum e^2, zeroed, saturated and non-finite elements, and amax: cheap enough to run always.

    The fast Triton kernel takes MXFP4 blocks along a last axis of unit stride; for other tensors, and on the torch
    path, this costs as much as `decompose`. ValueError as there.
    """
    record, chosen = get_format(format), get_rule(rule)
    picked = pick_backend(backend, x)
    if picked == "triton":
        from mxprobe_kernels import triton_backend

        along_last = bool(x.dim()) and dim in (-1, x.dim() - 1) and (x.stride(-1) == 1 or not x.numel())
        if record == MXFP4 and along_last and x.dtype != torch.float64:
            return triton_backend.lite(x, chosen)
        return from_decomposition(triton_backend.decompose(x, record, chosen, dim))
    if picked == "cpu":
        return cpu_backend.lite(x, record, chosen, dim)
    return from_decomposition(torch_backend.decompose(x, record, chosen, dim))


def pick_backend(backend: str, x: torch.Tensor) -> str:
    """Return the name of the backend to use. ValueError for one that is unknown, or that cannot take this tensor."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend == "auto":
        if x.device.type == "cuda" and has_triton():
            return "triton"
        return "cpu" if cpu_backend.supports(x) else "torch"
    if backend == "triton" and not has_triton():
        raise ValueError("backend 'triton': triton is not installed here; use backend='torch'")
    return backend


@cache
def has_triton() -> bool:
    """Return whether triton and our kernels for it can be imported: an agent's archive has only the torch path."""
    return find_spec("triton") is not None and find_spec("mxprobe_kernels.triton_backend") is not None
