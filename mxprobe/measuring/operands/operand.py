"""One operand of one GEMM: the decomposition of its rounding error, and of the error it makes in the product.

    A_e [M, C]  the operand of expert e, quantized in blocks along the contraction axis C; a Linear has one expert
    B_e [C, N]  the other operand, exact
    error of the product, component by component: (e_scale + e_dz + e_grid) B
    sums of a row = sums over the experts of the sums of each

Rows that were not all as likely to be measured carry weights: w_r multiplies what row r adds to a sum, so that a matrix
of which row r is sqrt(w_r) times as large has the weighted sums, products included.

Rows (along tokens: columns) that an expert does not have are zeros. A zero adds nothing to any energy, and a block that
ends in zeros rounds as a shorter block does; counts are taken over the elements that are there. The number of
operations does not grow with E.

Pure functions on tensors. Products are float64: TF32 and reduced-precision settings belong to the user, and do
not reach float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import mxprobe_kernels
from mxprobe.events import Event
from mxprobe.measuring.operands.pieces import pieces
from mxprobe.measuring.products import inner, product
from mxprobe.schema import ENERGY_SUMS, Role, Row
from mxprobe.tables import EXPERT_SUMS, OUTPUT_SUMS
from mxprobe_kernels import cpu_backend
from mxprobe_kernels.torch_backend import ErrorFields, energies

IDENTITY_TOLERANCE = 1e-5
"""How far the components of a row may be from their total, as a share of it."""


class Operand(NamedTuple):
    """An operand and what it is multiplied with, E matrices each."""

    role: Role
    a: torch.Tensor
    """[E, M, C]"""
    b: torch.Tensor
    """[E, C, N]"""
    sampled_frac: float
    n_clusters: int
    n_certain: int = 0
    """The last rows, which count `certain_weight` where the others count 1; of one matrix alone."""
    certain_weight: float = 1.0
    there: torch.Tensor | None = None
    """bool, broadcasts to [E, M, C]: the element exists. None for a Linear, where all do."""

    @property
    def n_counted(self) -> float:
        """How many rows there are, each as often as it counts."""
        return self.a.shape[0] * self.a.shape[1] + self.n_certain * (self.certain_weight - 1.0)

    @property
    def has_cut_blocks(self) -> bool:
        """Whether blocks can end where the tokens of an expert do."""
        return self.there is not None and self.there.shape[-1] > 1

    @property
    def weights(self) -> torch.Tensor | None:
        """float64 [M], or None where all rows count 1."""
        if not self.n_certain:
            return None
        weights = torch.ones(self.a.shape[1], dtype=torch.float64, device=self.a.device)
        weights[-self.n_certain :] = self.certain_weight
        return weights


class Measured(NamedTuple):
    """What `measure_operand` hands on to `measure_corrections`."""

    row: Row
    """The sums of a row of table `tensors`, over the experts."""
    fields: ErrorFields
    """Tensors [E, M, C]."""
    b: torch.Tensor
    """float64 [E, C, N], finite."""
    weights: torch.Tensor | None = None
    """float64 [M]"""
    per_expert: Mapping[str, list[float]] = MappingProxyType({})
    """Name of `tables.EXPERT_SUMS` -> one value for each expert; empty for a Linear."""

    @property
    def weighted(self) -> ErrorFields:
        """The fields with rows as large as their weights make them."""
        return self.fields if self.weights is None else _times(self.fields, self.weights.sqrt())


@torch.no_grad()
def measure_operand(operand: Operand, *, format: str, rule: str) -> Measured:
    """Measure the sums of one row of table `tensors`: energies and counts of A, and `tables.OUTPUT_SUMS` of A B.

    A format with a scale for the tensor has one for all matrices together.
    """
    fields = mxprobe_kernels.error_fields(operand.a, format=format, rule=rule)
    b = operand.b.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    measured = Measured({}, fields, b, operand.weights)
    outputs = output_sums(measured.weighted, b)
    row = _tensor_sums(operand, fields, rule)
    row.update(zip(OUTPUT_SUMS, outputs.sum(1).tolist()))
    row.update(sampled_frac=operand.sampled_frac, n_clusters=operand.n_clusters)
    if operand.there is None:
        return measured._replace(row=row)
    counted = _count_there(row, operand.there.expand(operand.a.shape), fields)
    n_nonfinite = (~operand.a.isfinite()).sum((1, 2))
    return measured._replace(row=row, per_expert=_per_expert(fields, outputs, counted, n_nonfinite))


def _tensor_sums(operand: Operand, fields: ErrorFields, rule: str) -> Row:
    """Return energies, counts and histograms of A."""

    def of(a: torch.Tensor) -> Row:
        # The C++ library is fast, but sums in float32; experts keep the float64 sums of the fields.
        fast = operand.there is None and a.device.type == "cpu" and cpu_backend.supports(a)
        of_a = fields if a is operand.a else mxprobe_kernels.error_fields(a, format=fields.format.name, rule=rule)
        sums = mxprobe_kernels.decompose(a, format=fields.format.name, rule=rule) if fast else of_a.decomposition()
        return sums.to_dict()

    if not operand.n_certain:
        return of(operand.a)
    drawn, certain = operand.a[:, : -operand.n_certain], operand.a[:, -operand.n_certain :]
    return added(of(drawn), of(certain), operand.certain_weight)


def _count_there(row: Row, there: torch.Tensor, fields: ErrorFields) -> torch.Tensor:
    """Leave out of a row's counts the elements that are not there; return those counted of each expert, int64 [E]."""
    width, block = there.shape[-1], fields.format.block
    excluded = fields.scales.excluded.reshape(*there.shape[:2], -1).repeat_interleave(block, -1)[..., :width]
    counted = (there & ~excluded).sum((1, 2))
    n_blocks = F.pad(there, (0, -width % block)).unflatten(-1, (-1, block)).any(-1).sum()
    n_there = int(counted.sum())
    if fields.format.name == "mxfp4":
        row["code_hist"][0] -= row["n"] - n_there
    row.update(n=n_there, n_blocks=int(n_blocks))
    return counted


def _per_expert(
    f: ErrorFields, outputs: torch.Tensor, n: torch.Tensor, n_nonfinite: torch.Tensor
) -> dict[str, list[float]]:
    """Return `tables.EXPERT_SUMS` of each expert, from its `OUTPUT_SUMS` [_, E] and counts [E]."""
    counts = {"n_deadzone": f.on_d, "n_zeroed": f.zeroed, "n_saturated": f.saturated}
    sums = {"n": n, "n_nonfinite": n_nonfinite, **dict(zip(OUTPUT_SUMS, outputs))}
    sums.update((name, flags.sum((1, 2))) for name, flags in counts.items())
    sums.update((name, e.sum((1, 2))) for name, e in zip(ENERGY_SUMS, energies(f)) if name in EXPERT_SUMS)
    return dict(zip(EXPERT_SUMS, torch.stack([sums[name].double() for name in EXPERT_SUMS]).tolist()))


_NEVER_WEIGHTED = ("n_nonfinite", "n_blocks_excluded", "n_clamped")
"""One is a finding, which no weight may round to none."""


def added(a: Row, b: Row, weight: float) -> Row:
    """Add the sums of `a`, and those of `b` by its weight; counts are rounded."""
    row: Row = {}
    for name, value in a.items():
        w = 1.0 if name in _NEVER_WEIGHTED else weight
        if name == "amax":
            row[name] = max(value, b[name])
        elif isinstance(value, (list, tuple)):
            row[name] = [round(u + w * v) for u, v in zip(value, b[name])]
        else:
            total = value + w * b[name]
            row[name] = round(total) if isinstance(value, int) else total
    return row


def _times(fields: ErrorFields, factors: torch.Tensor) -> ErrorFields:
    """Multiply the rows of x, Q and Q*; what is counted stays."""
    x, q, q_star = (part * factors[:, None] for part in (fields.x, fields.q, fields.q_star))
    return fields._replace(x=x, q=q, q_star=q_star)


def output_sums(fields: ErrorFields, b: torch.Tensor) -> torch.Tensor:
    """Return `tables.OUTPUT_SUMS` of each expert, float64 [10, E], for b float64 [E, C, N].

    They are squared norms and inner products of the error of A B, by component.
    """
    sums = b.new_zeros(len(OUTPUT_SUMS), len(b))
    for experts, rows in pieces(fields.x):
        sums[:, experts] += _output_sums(part_of(fields, experts, rows), b[experts])
    return sums


def part_of(fields: ErrorFields, experts: slice, rows: slice) -> ErrorFields:
    """The fields that sums of products read, at these experts and rows."""
    names = ("x", "q", "q_star", "on_d", "zeroed", "saturated")
    return fields._replace(**{name: getattr(fields, name)[experts, rows] for name in names})


def _output_sums(fields: ErrorFields, b: torch.Tensor) -> torch.Tensor:
    e = fields.e
    parts = [fields.x, fields.e_scale, fields.e_dz, fields.e_grid, e * fields.zeroed]
    if not fields.rule.covers_amax:
        parts.append(e * fields.saturated)
    products = product(torch.cat(parts, 1), b).chunk(len(parts), 1)
    ref, scale, deadzone, grid, zeroed = products[:5]
    total = scale + deadzone + grid
    saturated = products[5] if len(products) > 5 else torch.zeros_like(ref)
    pairs = (
        *((part, part) for part in (ref, total, scale, deadzone, grid)),
        *((scale, deadzone), (scale, grid), (deadzone, grid)),
        *((part, part) for part in (zeroed, saturated)),
    )
    return torch.stack([inner(u, v) for u, v in pairs])


def identity_error(row: Row) -> float:
    """Return how far a row's components are from its totals, relative to them: the larger of tensor and product.

    ||e||^2 = ||scale||^2 + ||dz||^2 + ||grid||^2 + 2 (<scale, grid> + <scale, dz>)       <dz, grid> = 0
    and for the product, whose components all overlap, with 2 <dz, grid> as well.
    """
    tensor = row["sum_scale2"] + row["sum_dz2"] + row["sum_grid2"] + 2 * (row["sum_scale_grid"] + row["sum_scale_dz"])
    out = row["out_scale2"] + row["out_dz2"] + row["out_grid2"]
    out += 2 * (row["out_scale_dz"] + row["out_scale_grid"] + row["out_dz_grid"])
    return max(_relative(tensor, row["sum_e2"]), _relative(out, row["out_e2"]))


def _relative(parts: float, total: float) -> float:
    return abs(parts - total) / total if total > 0 else abs(parts)


def identity_event(key: Mapping[str, Any], row: Row) -> Event | None:
    """Return an event where the components of an operand do not add up to its total error."""
    gap = identity_error(row)
    if gap <= IDENTITY_TOLERANCE:
        return None
    return Event("identity", key["module"], "violated", {"role": key["role"], "gap": gap})
