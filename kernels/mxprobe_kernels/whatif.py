"""What corrections would leave of a tensor's error: energies in all, on and off D, elements still zeroed. Shipped.

sum_e2      = sum (x^ - x)^2             x^: x under the correction, rounded to float32
sum_e2_on_d = the same on D              D: x != 0 and Q*(x) = 0, whatever the scale rule
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxprobe_kernels import stochastic
from mxprobe_kernels.blocks import from_blocks, rows_of, to_blocks
from mxprobe_kernels.corrections import quantize_operand
from mxprobe_kernels.formats import MXFP4, Rule, get_format, get_rule
from mxprobe_kernels.frontend import pick_backend
from mxprobe_kernels.recipe_grammar import Correction, Operand
from mxprobe_kernels.rounding import amax_bits

WHATIF_COLUMNS = ("n", "n_zeroed", "sum_e2", "sum_e2_on_d")
CHUNK_ELEMENTS = 1 << 20


@torch.no_grad()
def correction_errors(
    x: torch.Tensor,
    corrections: Sequence[str | Correction],
    *,
    rule: str | Rule = "rceil",
    dim: int = -1,
    backend: str = "auto",
) -> torch.Tensor:
    """Return float64 [corrections, 4] by `WHATIF_COLUMNS`, on the device of x. The error off D is the rest of sum_e2.

    x as for `apply_correction`, corrections spelled as there. Elements of blocks (of 32) with a NaN or an infinity, and
    those that a correction turns into one, count for nothing. One launch a correction on a GPU, and nothing is read
    from it; "cpu" and "torch" are one path, which quantizes by the C++ library where it can. ValueError as for
    `apply_correction` and `decompose`.
    """
    base = get_rule(rule)
    picked = pick_backend(backend, x)
    rows = rows_of(x, dim)
    found: list[torch.Tensor] = []
    for correction in corrections:
        operand = Operand.from_correction(correction, base)
        if picked == "triton" and rows.numel():
            from mxprobe_kernels import triton_whatif

            if triton_whatif.supports(operand):
                found.append(triton_whatif.errors(rows, operand))
                continue
        found.append(_errors(rows, operand))
    return torch.stack(found) if found else torch.zeros((0, len(WHATIF_COLUMNS)), dtype=torch.float64, device=x.device)


def _errors(rows: torch.Tensor, operand: Operand) -> torch.Tensor:
    """rows [R, K] -> float64 [4]."""
    total = torch.zeros(len(WHATIF_COLUMNS), dtype=torch.float64, device=rows.device)
    whole = operand.needs_whole_tensor or operand.stochastic
    step = max(len(rows), 1) if whole else max(CHUNK_ELEMENTS // max(rows.shape[1], 1), 1)
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        finite, on_d = _regions(part)
        if operand.stochastic:
            format = get_format(operand.format)
            for draw in range(stochastic.DRAWS):
                q = stochastic.quantize(part, format, operand.rule, -1, draw=draw)
                total += _sums(part, q, finite, on_d) / stochastic.DRAWS
        else:
            total += _sums(part, quantize_operand(part, operand), finite, on_d)
    return total


def _regions(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [R, K]: elements of finite blocks, and D: Q* = 0 where 6 |x| / amax is at most a quarter, exactly."""
    blocks, shape = to_blocks(rows, -1, MXFP4.block)
    bits, excluded = amax_bits(blocks)
    magnitude = blocks.abs().double()
    on_d = (magnitude * MXFP4.qmax <= bits.view(torch.float32).double() * 0.25) & (magnitude > 0)
    return from_blocks((~excluded).expand_as(blocks), shape), from_blocks(on_d, shape)


def _sums(x: torch.Tensor, corrected: torch.Tensor, finite: torch.Tensor, on_d: torch.Tensor) -> torch.Tensor:
    counted = finite & corrected.isfinite()
    error = torch.where(counted, corrected.double() - x.double(), 0.0).square_()
    zeroed = counted & (corrected == 0) & (x != 0)
    return torch.stack((counted.sum().double(), zeroed.sum().double(), error.sum(), (error * on_d).sum()))
