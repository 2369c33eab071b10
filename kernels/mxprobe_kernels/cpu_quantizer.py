"""Quantize and dequantize on a CPU by the C++ library, bit for bit what the float64 torch path yields. Shipped.

Two dozen passes over float64 temporaries become one over the tensor. In the calling thread: the tensors of a probe and
of an emulated layer are small, and the cores are the training's.
"""

from __future__ import annotations

import ctypes

import torch

from mxprobe_kernels.cpu_backend import library
from mxprobe_kernels.formats import Format, Rule, ScaleType

_MAX_BLOCK = 1024
"""Of quantize.cpp: 32 x 32, the largest square block."""


def supports(blocks: torch.Tensor, format: Format) -> bool:
    """Whether `quantize` takes float32 blocks of that format: not those that try two scales, nor HiF4.

    A graph that torch.compile traces keeps the torch path, whose operations it can fuse.
    """
    return (
        format.scale in (ScaleType.E8M0, ScaleType.E4M3)
        and not format.four_over_six
        and format.block <= _MAX_BLOCK
        and blocks.device.type == "cpu"
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
    """float32 [R, N, B] -> Q in `dtype` (float32 or float64), NaN in excluded blocks, and exponents, int32 [R, N, 1].

    `tensor_amax`: float32 [], of all finite elements, where the format has a scale for the tensor. ValueError where
    `supports` is False or `isa` is unknown.
    """
    loaded = library()
    if loaded is None or not supports(blocks, format):
        raise ValueError(f"the CPU library cannot quantize this tensor to {format.name}; use the torch path")
    x = blocks.detach().contiguous()
    q = torch.empty_like(x, dtype=dtype)
    exponents = torch.empty((*x.shape[:-1], 1), dtype=torch.int32)
    unit = 0.0
    if format.scale is ScaleType.E4M3:
        assert tensor_amax is not None  # every format with E4M3 scales has one for the tensor
        unit = float(tensor_amax.float() / (format.tensor_top * format.qmax)) or 1.0
    failed = loaded.mxprobe_quantize(
        x.data_ptr(),
        exponents.numel(),
        format.block,
        format.mantissa_bits,
        format.min_exponent,
        format.qmax,
        format.amax_bias(rule),
        format.max_exponent,
        ctypes.c_double(unit),
        dtype == torch.float64,
        isa.encode(),
        q.data_ptr(),
        exponents.data_ptr(),
    )
    if failed:
        raise ValueError(f"no quantizer for instruction set {isa!r} here")
    return q, exponents
