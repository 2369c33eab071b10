# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Launching the what-if kernel: one launch a correction. Nothing here synchronises or copies to the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from mxprobe_kernels.corrections import rotation_signs
from mxprobe_kernels.formats import MXFP4, get_format
from mxprobe_kernels.recipe_grammar import CorrectionKind, Operand
from mxprobe_kernels.rounding import tensor_unit
from mxprobe_kernels.stochastic import DRAWS, SEED
from mxprobe_kernels.torch_backend import finite_amax
from mxprobe_kernels.triton_exact_backend import INTERPRETED_ELEMENTS, TILE_ELEMENTS, integers, programs
from mxprobe_kernels.triton_formats import constants
from mxprobe_kernels.triton_whatif_kernel import FALLBACK, FORMAT, HADAMARD, MACRO, STOCHASTIC, correction_errors

MAX_WIDTH = 256
"""Elements of the largest macro block: a tile is one of these."""
MAX_ROTATION = 128

_KINDS = {
    CorrectionKind.MACRO_BLOCK_SCALING: MACRO.value,
    CorrectionKind.OUTLIER_FALLBACK: FALLBACK.value,
    CorrectionKind.HADAMARD: HADAMARD.value,
}


def supports(operand: Operand) -> bool:
    """Return whether the kernel computes this operand.

    It has one correction, rounds MXFP4 alone stochastically, and cannot rank channels. A tile is a power of two wide.
    """
    if operand.is_high_precision or operand.square or len(operand.corrections) > 1:
        return False
    if operand.stochastic:
        return operand.format == MXFP4.name
    for correction in operand.corrections:
        limit = MAX_ROTATION if correction.kind is CorrectionKind.HADAMARD else MAX_WIDTH
        return correction.kind in _KINDS and correction.size <= limit and not correction.size & (correction.size - 1)
    return True


def options(operand: Operand, dtype: torch.dtype, tile_elements: int) -> dict[str, Any]:
    """Return the constexpr arguments of the kernel."""
    format = get_format(operand.format)
    kind, size = STOCHASTIC.value if operand.stochastic else FORMAT.value, format.block
    for correction in operand.corrections:
        kind, size = _KINDS[correction.kind], correction.size or format.block
    width = max(size, 32)
    if operand.stochastic:  # the words of four draws are in registers together
        tile_elements //= 4
    return {
        "KIND": kind,
        "BF16": dtype == torch.bfloat16,
        "ROWS": max(tile_elements // width, 1),
        "WIDTH": width,
        "BLOCK": size,
        "FACTOR": size**-0.5,
        "DRAWS": DRAWS if operand.stochastic else 1,
        "SEED": SEED,
        **constants(format, operand.rule),
    }


def errors(rows: torch.Tensor, operand: Operand) -> torch.Tensor:
    """Return float64 [4] by `whatif.WHATIF_COLUMNS` from rows [R, K] of any strides, blocks along K."""
    if rows.dtype == torch.float64:
        rows = rows.float()
    device = rows.device
    constexprs = options(operand, rows.dtype, INTERPRETED_ELEMENTS if device.type == "cpu" else TILE_ELEMENTS)
    kind, format = constexprs["KIND"], get_format(operand.format)
    width, height = constexprs["WIDTH"], constexprs["ROWS"]
    n_tiles = triton.cdiv(rows.shape[0], height) * triton.cdiv(rows.shape[1], width)
    part = torch.empty((min(n_tiles, programs(device)), 4), dtype=torch.float64, device=device)
    correction_errors[(len(part),)](
        integers(rows),
        part,
        tensor_unit(finite_amax(rows), format) if format.tensor_scale else None,
        rotation_signs(constexprs["BLOCK"], device) if kind == HADAMARD.value else None,
        _constant(operand.corrections[0].number, device) if kind == FALLBACK.value else None,
        *(*rows.shape, *rows.stride()),
        **constexprs,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return part.sum(0)


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """float64 [1]. Copied to the device once, by the first launch: a warm-up before a CUDA graph is captured."""
    return torch.full((1,), value, dtype=torch.float64, device=device)
