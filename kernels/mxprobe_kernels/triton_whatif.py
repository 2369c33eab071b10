# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Launching the what-if kernel: one launch a correction. Nothing here synchronises or copies to the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from mxprobe_kernels.corrections import parameter_of, rotation_signs
from mxprobe_kernels.formats import MXFP4, Correction, CorrectionKind, Rule, get_rule
from mxprobe_kernels.rounding import tensor_unit
from mxprobe_kernels.stochastic import SEED
from mxprobe_kernels.torch_backend import finite_amax
from mxprobe_kernels.triton_exact_backend import INTERPRETED_ELEMENTS, TILE_ELEMENTS, integers, programs
from mxprobe_kernels.triton_formats import constants
from mxprobe_kernels.triton_whatif_kernel import correction_errors
from mxprobe_kernels.whatif import DRAWS

MAX_WIDTH = 256
"""Of a macro block: a tile is one of these."""
MAX_ROTATION = 128

_FORMAT, _MACRO, _FALLBACK, _HADAMARD, _STOCHASTIC = range(5)
_KINDS = {
    CorrectionKind.MACRO_BLOCK_SCALING: _MACRO,
    CorrectionKind.OUTLIER_FALLBACK: _FALLBACK,
    CorrectionKind.HADAMARD: _HADAMARD,
    CorrectionKind.STOCHASTIC: _STOCHASTIC,
}


def supports(correction: Correction) -> bool:
    """Not: `channels:k`, which ranks the whole tensor's channels, and `keep_high_precision`, which needs no kernel."""
    kind, size = correction.kind, parameter_of(correction)
    if kind in (CorrectionKind.MACRO_BLOCK_SCALING, CorrectionKind.HADAMARD):
        # a tile is a power of two wide
        limit = MAX_WIDTH if kind is CorrectionKind.MACRO_BLOCK_SCALING else MAX_ROTATION
        return int(size) <= limit and int(size) & (int(size) - 1) == 0
    return kind not in (CorrectionKind.CHANNEL_RESIDUAL, CorrectionKind.KEEP_HIGH_PRECISION)


def options(correction: Correction, rule: Rule, dtype: torch.dtype, tile_elements: int) -> dict[str, Any]:
    """The constexpr arguments of the kernel."""
    kind = _KINDS.get(correction.kind, _FORMAT)
    size = int(parameter_of(correction)) if kind in (_MACRO, _HADAMARD) else MXFP4.block
    format = MXFP4
    if kind == _FORMAT:
        format = correction.format or MXFP4
        if correction.kind is CorrectionKind.RULE:
            rule = get_rule(str(correction.parameter))
        elif not correction.keeps_format:
            rule = Rule.RCEIL
        size = format.block
    width = max(size, 32)
    if kind == _STOCHASTIC:  # the words of four draws are in registers together
        tile_elements //= 4
    return {
        "KIND": kind,
        "BF16": dtype == torch.bfloat16,
        "ROWS": max(tile_elements // width, 1),
        "WIDTH": width,
        "BLOCK": size,
        "FACTOR": size**-0.5,
        "DRAWS": DRAWS if kind == _STOCHASTIC else 1,
        "SEED": SEED,
        **constants(format, rule),
    }


def errors(rows: torch.Tensor, correction: Correction, rule: Rule) -> torch.Tensor:
    """rows [R, K] of any strides, blocks along K -> float64 [4] by `WHATIF_COLUMNS`."""
    if rows.dtype == torch.float64:
        rows = rows.float()
    device = rows.device
    constexprs = options(correction, rule, rows.dtype, INTERPRETED_ELEMENTS if device.type == "cpu" else TILE_ELEMENTS)
    kind = constexprs["KIND"]
    format = correction.format
    scaled = kind == _FORMAT and format is not None and format.tensor_scale
    width, height = constexprs["WIDTH"], constexprs["ROWS"]
    n_tiles = triton.cdiv(rows.shape[0], height) * triton.cdiv(rows.shape[1], width)
    part = torch.empty((min(n_tiles, programs(device)), 4), dtype=torch.float64, device=device)
    correction_errors[(len(part),)](
        integers(rows),
        part,
        tensor_unit(finite_amax(rows), format) if scaled and format else None,
        rotation_signs(constexprs["BLOCK"], device) if kind == _HADAMARD else None,
        _constant(float(parameter_of(correction)), device) if kind == _FALLBACK else None,
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
