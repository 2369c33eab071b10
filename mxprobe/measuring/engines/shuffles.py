"""Where an engine's kernels want the rows and scales of packed MXFP4 weights: the per-engine table of shuffles.

    w13 row of gate i, up i     stacked      i, F + i              as loaded
                                swapped      F + i, i              FlashInfer's CUTLASS kernels
                                pairs        2i, 2i + 1            as gpt-oss is loaded
                                tiled pairs  t(2i + 1), t(2i)      FlashInfer's TensorRT-LLM kernels
    w2 row of o                 o, or t(o)
    t(r) = 32 floor(r / 32) + 8 (r mod 4) + floor((r mod 32) / 4)

    scale of (stored row r, block c) of [N, C], by rows: C r + c
    tiled by 128 x 4, C' = C rounded up to 4:
        (floor(r / 128) C' / 4 + floor(c / 4)) 512 + 16 (r mod 32) + 4 floor((r mod 128) / 32) + c mod 4

Read from vLLM 0.33.0, SGLang 0.5.23 and FlashInfer 0.7.4. An engine says in its quantization method which kernel it
has prepared the weights for. Marlin's, DeepGEMM's, Humming's, Triton's, AITER's and the Hopper CUTLASS kernel's layouts
are not in the table. Scales are those of packed weights; unpacked ones have their rows in the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

GATE, UP = 0, 1


class Shuffle(NamedTuple):
    """How the codes and scales of one module are stored."""

    words: str
    w13: Callable[[int, torch.Tensor, int], torch.Tensor]
    """(GATE or UP, int64 [R] rows of that weight, F) -> int64 [R] stored rows."""
    w2: Callable[[torch.Tensor], torch.Tensor]
    tiled_scales: bool


def tiled_rows(rows: torch.Tensor) -> torch.Tensor:
    """t(r), int64 [R]: rows of a 128-row tile as the epilogue of TensorRT-LLM's kernels takes them."""
    return rows // 32 * 32 + rows % 4 * 8 + rows % 32 // 4


def _same(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _stacked(part: int, rows: torch.Tensor, size: int) -> torch.Tensor:
    return rows + part * size


def _swapped(part: int, rows: torch.Tensor, size: int) -> torch.Tensor:
    return rows + (UP - part) * size


def _pairs(part: int, rows: torch.Tensor, size: int) -> torch.Tensor:
    return 2 * rows + part


def _tiled_pairs(part: int, rows: torch.Tensor, size: int) -> torch.Tensor:
    return tiled_rows(2 * rows + UP - part)


AS_LOADED = Shuffle("", _stacked, _same, False)
_AS_LOADED_PAIRS = Shuffle("gate and up row by row", _pairs, _same, False)
_TILED = Shuffle("for CUTLASS", _stacked, _same, True)
_SWAPPED = Shuffle("for FlashInfer CUTLASS", _swapped, _same, True)
_TRTLLM = Shuffle("for FlashInfer TensorRT-LLM", _tiled_pairs, tiled_rows, True)

_FLASHINFER = {
    "FLASHINFER_TRTLLM_MXFP4_MXFP8": _TRTLLM,
    "FLASHINFER_TRTLLM_MXFP4_BF16": _TRTLLM,
    "FLASHINFER_CUTLASS_MXFP4_MXFP8": _SWAPPED,
}
_PLAIN_BACKENDS = ("B12X_MXFP4_MXFP8", "B12X_MXFP4_BF16", "XPU", "EMULATION", "None")
_TYPES = ("use_flashinfer_trtllm_moe", "use_triton_kernels", "use_deep_gemm")
EXPERTS: dict[tuple[str, str], tuple[tuple[str, ...], dict[Any, Shuffle]]] = {
    ("vllm", "GptOssMxfp4MoEMethod"): (
        ("mxfp4_backend",),
        {**_FLASHINFER, **dict.fromkeys(("XPU", "EMULATION", "None"), _AS_LOADED_PAIRS)},
    ),
    ("vllm", "Mxfp4MoEMethod"): (
        ("mxfp4_backend",),
        {**_FLASHINFER, "CUTLASS_MXFP4_MXFP4": _TILED, **dict.fromkeys(_PLAIN_BACKENDS, AS_LOADED)},
    ),
    ("vllm", "UnquantizedFusedMoEMethod"): (
        ("unquantized_backend",),
        {**dict.fromkeys(("TRITON", "BATCHED_TRITON"), AS_LOADED), "FlashInfer CUTLASS": _SWAPPED},
    ),
    ("sglang", "Mxfp4MoEMethod"): (("_fi_kernel",), {"trtllm_sm100": _TRTLLM}),
    ("sglang", "UnquantizedFusedMoEMethod"): (_TYPES, {"False, False, False": AS_LOADED}),
}
"""(package, class of `quant_method`) -> (its attributes that name the kernel, the shuffle by their values)."""

LINEARS: dict[tuple[str, str], Shuffle] = {
    ("vllm", "EmulationMxfp4LinearKernel"): AS_LOADED,
    ("vllm", "FlashInferMxFp4LinearKernel"): _TILED,
}
"""(package, class of the `kernel` of a layer's `scheme`) -> how the layer is stored."""


def experts_shuffle(module: nn.Module, *, packed: bool) -> Shuffle | str:
    """How experts are stored, or why that is not known; unpacked ones as they were loaded where nothing says else."""
    method = vars(module).get("quant_method")
    attributes, shuffles = EXPERTS.get(_class_of(method), ((), {}))
    if not shuffles:
        return f"unknown layout: packed experts of {type(method).__name__}" if packed else AS_LOADED
    values = [getattr(method, each, None) for each in attributes]
    kernel = ", ".join(str(getattr(each, "value", each)) for each in values)  # vLLM's are enumerations
    return shuffles.get(kernel, f"unknown layout: {type(method).__name__} has arranged it for {kernel}")


def linear_shuffle(module: nn.Module) -> Shuffle | str:
    """How a packed Linear is stored; as it was loaded where nothing says that it was prepared for a kernel."""
    scheme = vars(module).get("scheme")
    kernel = getattr(scheme, "kernel", None)
    if kernel is None:
        return AS_LOADED
    return LINEARS.get(_class_of(kernel), f"unknown layout: codes permuted by {type(kernel).__name__}")


def _class_of(thing: Any) -> tuple[str, str]:
    return type(thing).__module__.partition(".")[0], type(thing).__name__


def scales_at(stored: torch.Tensor, rows: torch.Tensor, n_blocks: int, *, tiled: bool) -> torch.Tensor:
    """uint8 [R, C] of the stored rows `rows`, int64 [R], out of the scales of one matrix in any shape."""
    columns = torch.arange(n_blocks, device=stored.device)
    if tiled:
        width = -(-n_blocks // 4)
        tile = (rows // 128)[:, None] * width + columns // 4
        place = tile * 512 + (rows % 32 * 16 + rows % 128 // 32 * 4)[:, None] + columns % 4
    else:
        place = rows[:, None] * n_blocks + columns
    return stored.detach().reshape(-1).view(torch.uint8)[place]


def scales_needed(n_rows: int, n_blocks: int, *, tiled: bool) -> int:
    """Bytes of the scales of a matrix stored so."""
    return -(-n_rows // 128) * 128 * -(-n_blocks // 4) * 4 if tiled else n_rows * n_blocks
