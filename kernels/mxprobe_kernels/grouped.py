"""Statistics per expert of a grouped GEMM's operand, in one pass. Shipped.

    expert e has rows offsets[e] to offsets[e + 1] of x [T, K]       tokens sorted by expert, offsets on the device

Blocks run along K, or down the tokens of one expert (`dim=0`, as wgrad sees them): there a block starts with the
expert's first token, and its last block may be short. Experts may be empty or have one token; rows before the first
offset and past the last (padding) belong to nobody.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxprobe_kernels import cpu_backend, torch_grouped
from mxprobe_kernels.decomposition import Decomposition, combine
from mxprobe_kernels.formats import Format, Rule, get_format, get_rule
from mxprobe_kernels.frontend import pick_backend


class GroupedDecomposition(NamedTuple):
    """Decompositions of E experts, still on their device: `grouped[e]`, `grouped.total()`."""

    values: torch.Tensor
    """float64 [E, N_VALUES]; a row is what `Decomposition.values` holds."""
    format: str
    rule: str

    def expert(self, e: int) -> Decomposition:
        return Decomposition(self.values[e], self.format, self.rule)

    def total(self) -> Decomposition:
        """Return the decomposition of all experts together."""
        return Decomposition(combine(self.values), self.format, self.rule)


@torch.no_grad()
def decompose_grouped(
    x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    format: str | Format = "mxfp4",
    rule: str | Rule = "rceil",
    dim: int = -1,
    backend: str = "auto",
) -> GroupedDecomposition:
    """Decompose each expert's rows of x [T, K] by itself, as `decompose` would; a tensor's scale is the expert's.

    offsets: int32 or int64 [E + 1] on the device of x, not decreasing, within [0, T]; read on the device, which is not
    synchronised. ValueError for a tensor that is no matrix, offsets that do not fit, a format of square blocks, or as
    for `decompose`.
    """
    record, chosen = get_format(format), get_rule(rule)
    if x.dim() != 2 or dim not in (-1, 0, 1):
        raise ValueError(f"a matrix of tokens by features is wanted, and dim -1 or 0; not {tuple(x.shape)}, dim {dim}")
    if offsets.dim() != 1 or not len(offsets) or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "offsets must be int32 or int64 [E + 1]: the first row of each expert, and the end of the last"
        )
    if offsets.device != x.device:
        raise ValueError(f"offsets must be on {x.device}, as x is, not on {offsets.device}")
    if record.block_rows > 1:
        raise ValueError(f"{record.name} has square blocks, which tokens of several experts would share")
    picked = pick_backend(backend, x)
    along_tokens = dim == 0
    if picked == "triton" and record.name == "mxfp4":
        from mxprobe_kernels import triton_grouped

        values = triton_grouped.decompose(x, offsets, chosen, along_tokens)
    elif picked == "cpu":
        values = _cpu(x, offsets, record, chosen, along_tokens)
    else:
        values = torch_grouped.decompose(x, offsets, record, chosen, along_tokens)
    return GroupedDecomposition(values, record.name, chosen.value)


def _cpu(x: torch.Tensor, offsets: torch.Tensor, format: Format, rule: Rule, along_tokens: bool) -> torch.Tensor:
    bounds = offsets.tolist()
    values = x.new_empty((len(bounds) - 1, torch_grouped.N_VALUES), dtype=torch.float64)
    for e, (first, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        values[e] = cpu_backend.decompose(x[first:end], format, rule, 0 if along_tokens else -1).values
    return values
