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

from typing import Any, NamedTuple

import torch
from torch import nn

GATE, UP = 0, 1


def tiled_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return t(r), int64 [R]: rows of a 128-row tile as the epilogue of TensorRT-LLM's kernels takes them."""
    return rows // 32 * 32 + rows % 4 * 8 + rows % 32 // 4


class RowMap(NamedTuple):
    """Where the rows of a matrix are stored: row i at first + every i, or at t() of that."""

    first: int = 0
    every: int = 1
    is_tiled: bool = False

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn rows of the matrix, int64 [R], into stored rows, int64 [R]."""
        stored = self.first + self.every * rows
        return tiled_rows(stored) if self.is_tiled else stored


class Shuffle(NamedTuple):
    """How the codes and scales of one module are stored."""

    words: str = ""
    is_swapped: bool = False
    """Up stands before gate."""
    in_pairs: bool = False
    """Gate and up alternate row by row."""
    is_tiled: bool = False
    tiled_scales: bool = False

    def rows_of(self, part: int, n_parts: int, size: int) -> RowMap:
        """Return where the `size` rows of GATE or UP are stored in w13 (`n_parts` 2), or those of w2 (`n_parts` 1)."""
        place = UP - part if self.is_swapped and n_parts > 1 else part
        if self.in_pairs and n_parts > 1:
            return RowMap(place, 2, self.is_tiled)
        return RowMap(place * size, 1, self.is_tiled)


AS_LOADED = Shuffle()
_AS_LOADED_PAIRS = Shuffle("gate and up row by row", in_pairs=True)
_TILED = Shuffle("for CUTLASS", tiled_scales=True)
_SWAPPED = Shuffle("for FlashInfer CUTLASS", is_swapped=True, tiled_scales=True)
_TRTLLM = Shuffle("for FlashInfer TensorRT-LLM", is_swapped=True, in_pairs=True, is_tiled=True, tiled_scales=True)

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
    """Say how experts are stored, or why that is not known; unpacked ones as loaded where nothing says else."""
    method = vars(module).get("quant_method")
    attributes, shuffles = EXPERTS.get(_class_of(method), ((), {}))
    if not shuffles:
        return f"unknown layout: packed experts of {type(method).__name__}" if packed else AS_LOADED
    values = [getattr(method, each, None) for each in attributes]
    kernel = ", ".join(str(getattr(each, "value", each)) for each in values)  # vLLM's are enumerations
    return shuffles.get(kernel, f"unknown layout: {type(method).__name__} has arranged it for {kernel}")


def linear_shuffle(module: nn.Module) -> Shuffle | str:
    """Say how a packed Linear is stored: as it was loaded, where nothing says that it was prepared for a kernel."""
    scheme = vars(module).get("scheme")
    kernel = getattr(scheme, "kernel", None)
    if kernel is None:
        return AS_LOADED
    return LINEARS.get(_class_of(kernel), f"unknown layout: codes permuted by {type(kernel).__name__}")


def _class_of(thing: Any) -> tuple[str, str]:
    return type(thing).__module__.partition(".")[0], type(thing).__name__


def scales_at(stored: torch.Tensor, rows: torch.Tensor, n_blocks: int, *, tiled: bool) -> torch.Tensor:
    """Return uint8 [R, C] of the stored rows `rows`, int64 [R], out of the scales of one matrix in any shape."""
    columns = torch.arange(n_blocks, device=stored.device)
    if tiled:
        width = -(-n_blocks // 4)
        tile = (rows // 128)[:, None] * width + columns // 4
        place = tile * 512 + (rows % 32 * 16 + rows % 128 // 32 * 4)[:, None] + columns % 4
    else:
        place = rows[:, None] * n_blocks + columns
    return stored.detach().reshape(-1).view(torch.uint8)[place]


def scales_needed(n_rows: int, n_blocks: int, *, tiled: bool) -> int:
    """Return the bytes of the scales of a matrix."""
    return -(-n_rows // 128) * 128 * -(-n_blocks // 4) * 4 if tiled else n_rows * n_blocks
