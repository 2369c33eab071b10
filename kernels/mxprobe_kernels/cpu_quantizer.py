"""Quantize and dequantize on a CPU by the C++ library, bit for bit what the float64 torch path yields. Shipped.

Two dozen passes over float64 temporaries become one over the tensor. In the calling thread: the tensors of a probe and
of an emulated layer are small, and the cores are the training's.
"""

from __future__ import annotations

import ctypes

import torch

from mxprobe_kernels.cpu_backend import FormatRecord, library
from mxprobe_kernels.formats import Format, Rule


def supports(blocks: torch.Tensor) -> bool:
    """Return whether `quantize` takes these float32 blocks.

    A graph that torch.compile traces keeps the torch path, whose operations it can fuse.
    """
    return (
        blocks.device.type == "cpu"
        and type(blocks) is torch.Tensor
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def quantize(
    blocks: torch.Tensor,
    format: Format,
    rule: Rule,
    tensor_amax: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    isa: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q of blocks, float32 [R, N, B], in `dtype` (float32 or float64), and exponents, int32 [R, N, 1].

    Q is NaN in excluded blocks.

    `tensor_amax`: float32 [], of all finite elements, where the format has a scale for the tensor. ValueError where
    `supports` is False or `isa` is unknown.
    """
    loaded = library()
    if loaded is None or not supports(blocks):
        raise ValueError(f"the CPU library cannot quantize this tensor to {format.name}; use the torch path")
    x = blocks.detach().contiguous()
    q = torch.empty_like(x, dtype=dtype)
    exponents = torch.empty((*x.shape[:-1], 1), dtype=torch.int32)
    record = FormatRecord.of(format, rule, x.shape[-1], tensor_amax)
    failed = loaded.mxprobe_quantize(
        ctypes.byref(record),
        *(x.data_ptr(), exponents.numel(), dtype == torch.float64, isa.encode(), q.data_ptr(), exponents.data_ptr()),
    )
    if failed:
        raise ValueError(f"no quantizer for instruction set {isa!r} here")
    return q, exponents
