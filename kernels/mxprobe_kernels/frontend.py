"""The public functions: names resolved, the backend chosen. Shipped.

Rule of choice for `backend="auto"`: Triton for tensors on a CUDA or HIP device where triton can be imported,
else the plain torch path. Every backend yields the same codes, counts and histograms, and sums within 1e-6 of
float64; the torch path is float64 itself.
"""

from __future__ import annotations

import torch

from mxprobe_kernels import torch_backend
from mxprobe_kernels.decomposition import Decomposition
from mxprobe_kernels.formats import Format, Rule, get_format, get_rule
from mxprobe_kernels.torch_backend import ErrorFields

BACKENDS = ("auto", "torch")


def decompose(
    x: torch.Tensor,
    *,
    format: str | Format = "mxfp4",
    rule: str | Rule = "rceil",
    dim: int = -1,
    backend: str = "auto",
) -> Decomposition:
    """Decompose the quantization error of x, blocks along `dim` (the contraction axis of the consuming GEMM).

    x: float32, bfloat16, float16 or float64 (rounded to float32), any shape and strides. Blocks with a NaN or
    an infinity are counted and left out. Nothing is copied from the device until a number is read off the
    result. ValueError for an unknown format, rule or backend, or a tensor that has no such axis.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    return torch_backend.decompose(x, get_format(format), get_rule(rule), dim)


def quantize_dequantize(
    x: torch.Tensor, *, format: str | Format = "mxfp4", rule: str | Rule = "rceil", dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> (Q(x) shaped and typed like x, exponents of the power-of-two scales, int32, one per block at `dim`).

    A block with a NaN or an infinity comes back as NaN. ValueError as for `decompose`.
    """
    return torch_backend.quantize_dequantize(x, get_format(format), get_rule(rule), dim)


def error_fields(
    x: torch.Tensor, *, format: str | Format = "mxfp4", rule: str | Rule = "rceil", dim: int = -1
) -> ErrorFields:
    """The decomposition of x element by element; `.decomposition()` has its sums. ValueError as for `decompose`."""
    return torch_backend.error_fields(x, get_format(format), get_rule(rule), dim)
