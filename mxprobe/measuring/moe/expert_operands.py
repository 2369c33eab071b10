"""The operands of several experts' GEMMs: the decomposition of each expert's error, summed over the experts.

    A_e [M, C]   one expert's operand, blocks along C; rows (or, along tokens, columns) it does not have are zeros
    B_e [C, N]   the matrix that it meets
    sums of a layer = sum over experts of the sums of each

A zero adds nothing to any energy, and a block that ends in zeros rounds as a shorter block does; what is counted is
counted over the elements that are there. All experts of a chunk are taken in one operation each: the number of
launches does not grow with E. Products are float64, as in `mxprobe.measuring.operands.operand`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

import mxprobe_kernels
from mxprobe.schema import EXPERT_SUMS, OUTPUT_SUMS, Role, Row
from mxprobe_kernels.decomposition import Decomposition
from mxprobe_kernels.recipe_grammar import Correction
from mxprobe_kernels.torch_backend import ErrorFields


class Operands(NamedTuple):
    """One operand of E experts, as matrices."""

    role: Role
    a: torch.Tensor
    """[E, M, C]"""
    b: torch.Tensor
    """[E, C, N]"""
    there: torch.Tensor
    """bool, broadcasts to [E, M, C]: the element exists."""
    sampled_frac: float
    n_clusters: int
    features_only: bool
    """Blocks run along features: none is cut short by where an expert's tokens end."""
    at_once: int
    """Experts of a chunk: the same for all operands of a snapshot, so that their chunks can be paired."""

    def chunks(self) -> Iterator[Operands]:
        for start in range(0, len(self.a), self.at_once):
            part = slice(start, start + self.at_once)
            there = self.there if self.there.shape[0] == 1 else self.there[part]
            yield self._replace(a=self.a[part], b=self.b[part], there=there)


class Measured(NamedTuple):
    """What `measure` found."""

    row: Row
    """The sums of a row of table `tensors`, over the experts."""
    per_expert: dict[str, list[float]]
    """Sum -> one value for each expert: `schema.EXPERT_SUMS`."""
    whatifs: list[Row]
    """Rows of table `whatif` without when and where, over the experts."""
    fields: list[ErrorFields]
    """Of each chunk, tensors [E_c, M, C]."""


@torch.no_grad()
def measure(operands: Operands, corrections: Sequence[str], *, format: str, rule: str) -> Measured:
    """The sums of every expert and of all."""
    total: Decomposition | None = None
    n_there = n_blocks = 0
    outputs, per_expert, whatifs, kept = [], [], [], []
    for chunk in operands.chunks():
        experts, rows, width = chunk.a.shape
        flat = mxprobe_kernels.error_fields(chunk.a.reshape(-1, width), format=format, rule=rule)
        part = flat.decomposition()
        total = part if total is None else total + part
        there = chunk.there.expand(experts, rows, width)
        counted = there & ~_elementwise(flat.scales.excluded, flat).reshape(there.shape)
        n_there += int(counted.sum())
        n_blocks += int(
            F.pad(there, (0, -width % flat.format.block)).unflatten(-1, (-1, flat.format.block)).any(-1).sum()
        )
        fields = _by_expert(flat, experts)
        b = chunk.b.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        sums = _output_sums(fields, b)
        outputs.append(sums)
        nonfinite = (~chunk.a.isfinite()).sum((1, 2))
        per_expert.append(_per_expert(fields, sums, counted.sum((1, 2)), nonfinite))
        whatifs.append([_whatif(fields, b, correction) for correction in corrections])
        kept.append(fields)
    assert total is not None  # there is an expert
    row: Row = {**total.to_dict(), "sampled_frac": operands.sampled_frac, "n_clusters": operands.n_clusters}
    row["code_hist"][0] -= (row["n"] - n_there) if format == "mxfp4" else 0
    row.update(n=n_there, n_blocks=n_blocks)
    row.update(zip(OUTPUT_SUMS, torch.cat(outputs, 1).sum(1).tolist()))
    shared = {name: row[name] for name in ("n", "out_ref2", "sampled_frac", "n_clusters")}
    added = [torch.stack([part[i] for part in whatifs]).sum(0).tolist() for i in range(len(corrections))]
    values = torch.cat(per_expert, 1)
    return Measured(
        row=row,
        per_expert=dict(zip(EXPERT_SUMS, values.tolist())),
        whatifs=[
            {"correction": name, **shared, "n_zeroed": int(n), **dict(zip(_WHATIF_SUMS, sums))}
            for name, (n, *sums) in zip(corrections, added)
        ],
        fields=kept,
    )


_WHATIF_SUMS = ("sum_e2", "sum_e2_on_d", "out_e2", "out_zeroed2")
ELEMENTWISE = ("x", "q", "q_star", "on_d", "zeroed", "saturated", "code")


def _by_expert(flat: ErrorFields, experts: int) -> ErrorFields:
    shaped = {name: getattr(flat, name).reshape(experts, -1, flat.x.shape[-1]) for name in ELEMENTWISE}
    return flat._replace(**shaped)


def _elementwise(per_block: torch.Tensor, fields: ErrorFields) -> torch.Tensor:
    rows, width = fields.x.shape
    return per_block.reshape(rows, -1).repeat_interleave(fields.format.block, 1)[:, :width]


def _output_sums(fields: ErrorFields, b: torch.Tensor) -> torch.Tensor:
    """float64 [len(OUTPUT_SUMS), E]: norms and inner products of the error of A_e B_e, by component."""
    e = fields.e
    ref, scale, deadzone, grid, zeroed = (
        part @ b for part in (fields.x, fields.e_scale, fields.e_dz, fields.e_grid, e * fields.zeroed)
    )
    saturated = torch.zeros_like(ref) if fields.rule.covers_amax else (e * fields.saturated) @ b
    total = scale + deadzone + grid
    pairs = (
        *((part, part) for part in (ref, total, scale, deadzone, grid)),
        *((scale, deadzone), (scale, grid), (deadzone, grid)),
        *((part, part) for part in (zeroed, saturated)),
    )
    return torch.stack([(u * v).sum((1, 2)) for u, v in pairs])


def _per_expert(f: ErrorFields, outputs: torch.Tensor, n: torch.Tensor, n_nonfinite: torch.Tensor) -> torch.Tensor:
    """float64 [len(EXPERT_SUMS), E]"""
    found = dict(zip(OUTPUT_SUMS, outputs))
    sums = {
        "n": n,
        "n_deadzone": f.on_d.sum((1, 2)),
        "n_zeroed": f.zeroed.sum((1, 2)),
        "n_saturated": f.saturated.sum((1, 2)),
        "n_nonfinite": n_nonfinite,
        "sum_x2": f.x.square().sum((1, 2)),
        "sum_e2": f.e.square().sum((1, 2)),
        "sum_scale2": f.e_scale.square().sum((1, 2)),
        "sum_dz2": f.e_dz.square().sum((1, 2)),
        "sum_grid2": f.e_grid.square().sum((1, 2)),
        "sum_scale_grid": (f.e_scale * f.e_grid).sum((1, 2)),
        "sum_scale_dz": (f.e_scale * f.e_dz).sum((1, 2)),
        **found,
    }
    return torch.stack([sums[name].double() for name in EXPERT_SUMS])


def _whatif(fields: ErrorFields, b: torch.Tensor, correction: str) -> torch.Tensor:
    """float64 [5]: zeroed elements, then `_WHATIF_SUMS`, over the experts; each expert's matrix is a tensor."""
    x, rule = fields.x.float(), fields.rule
    if Correction.parse(correction).needs_whole_tensor:
        q = torch.stack([mxprobe_kernels.apply_correction(each, correction, rule=rule) for each in x])
    else:
        q = mxprobe_kernels.apply_correction(x.reshape(-1, x.shape[-1]), correction, rule=rule).reshape(x.shape)
    e = q.double() - fields.x
    parts = (e, e * fields.on_d, e @ b, (e * fields.zeroed) @ b)
    n_zeroed = ((q == 0) & (fields.x != 0)).sum().double()
    return torch.stack((n_zeroed, *(part.square().sum() for part in parts)))
