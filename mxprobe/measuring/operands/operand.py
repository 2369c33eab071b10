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

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import mxprobe_kernels
from mxprobe.measuring.products import inner, product
from mxprobe.schema import EXPERT_SUMS, OUTPUT_SUMS, Role
from mxprobe_kernels import cpu_backend
from mxprobe_kernels.formats import Correction
from mxprobe_kernels.torch_backend import ErrorFields

Row = dict[str, Any]

IDENTITY_TOLERANCE = 1e-5
"""Of sum_e2: how far the components of a row may be from their total."""
CPU_BATCH_ELEMENTS = 1 << 16
"""On a CPU, elements handled by one operation: enough to hide its overhead, few enough for the cache."""
DEVICE_BATCH_ELEMENTS = 1 << 18
"""There what an operation makes is to stay small: 8 to 100 bytes each."""


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
    """Name of `schema.EXPERT_SUMS` -> one value for each expert; empty for a Linear."""

    @property
    def weighted(self) -> ErrorFields:
        """The fields with rows as large as their weights make them."""
        return self.fields if self.weights is None else _times(self.fields, self.weights.sqrt())


@torch.no_grad()
def measure_operand(operand: Operand, *, format: str, rule: str) -> Measured:
    """The sums of one row of table `tensors`: energies and counts of A, and `schema.OUTPUT_SUMS` of A B."""
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
    """Energies, counts and histograms of A."""

    def of(a: torch.Tensor) -> Row:
        # Fast, of float32 sums; of what is masked the elements that are there are counted beside it.
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
    """`schema.EXPERT_SUMS` of each expert, from its `OUTPUT_SUMS` [_, E] and counts [E]."""
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
        **dict(zip(OUTPUT_SUMS, outputs)),
    }
    return dict(zip(EXPERT_SUMS, torch.stack([sums[name].double() for name in EXPERT_SUMS]).tolist()))


_NEVER_WEIGHTED = ("n_nonfinite", "n_blocks_excluded", "n_clamped")
"""One is a finding, which no weight may round to none."""


def added(a: Row, b: Row, weight: float) -> Row:
    """Sums of `a`, and of `b` by its weight; counts rounded."""
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
    """x, Q and Q* with their rows multiplied; what is counted stays."""
    x, q, q_star = (part * factors[:, None] for part in (fields.x, fields.q, fields.q_star))
    return fields._replace(x=x, q=q, q_star=q_star)


def output_sums(fields: ErrorFields, b: torch.Tensor) -> torch.Tensor:
    """`schema.OUTPUT_SUMS` of each expert, float64 [10, E]: squared norms and inner products of the error of A B by
    component; b float64 [E, C, N]."""
    sums = b.new_zeros(len(OUTPUT_SUMS), len(b))
    for experts, rows in _pieces(fields.x):
        sums[:, experts] += _output_sums(_of(fields, experts, rows), b[experts])
    return sums


def _on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def _pieces(x: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(experts, rows) of [E, M, C] to be handled by one operation each; sums add up over them.

    As many experts as there is room for; on a device as many rows of a large one, on a CPU all of them.
    """
    n, height, width = x.shape
    limit = CPU_BATCH_ELEMENTS if _on_host(x) else DEVICE_BATCH_ELEMENTS
    experts = max(limit // max(height * width, 1), 1)
    rows = max(height if _on_host(x) or experts > 1 else limit // max(width, 1), 1)
    for e in range(0, n, experts):
        for r in range(0, max(height, 1), rows):
            yield slice(e, e + experts), slice(r, r + rows)


def _of(fields: ErrorFields, experts: slice, rows: slice) -> ErrorFields:
    """What sums of products read of these experts and rows."""
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


@torch.no_grad()
def measure_corrections(batch: Sequence[Measured], corrections: Sequence[str]) -> Iterator[list[Row]]:
    """For each operand, one row of table `whatif` per correction: what A and A B would lose under it.

    All operands of the batch have the same contraction length C, so that their rows can be corrected in one call.
    Elements of blocks with a NaN or an infinity are left out, as everywhere. NVFP4's tensor scale is each matrix's
    own, from the sampled rows, the largest of which may be smaller than the tensor's.
    """
    if not corrections:
        return
    inputs = [m.fields.x.float() for m in batch]
    sizes = [x.shape[0] * x.shape[1] for x in inputs]
    together = torch.cat([x.flatten(0, 1) for x in inputs])
    rule = batch[0].fields.rule
    grams = [product(m.b, m.b.mT) if m.b.shape[1] < m.b.shape[2] else None for m in batch]
    parts: list[list[torch.Tensor]] = [[] for _ in batch]
    for some in _at_a_time(corrections, together):
        corrected: list[Sequence[torch.Tensor]] = []
        for correction in some:
            if Correction.parse(correction).needs_whole_tensor:
                corrected.append(
                    [
                        torch.stack([mxprobe_kernels.apply_correction(each, correction, rule=rule) for each in x])
                        for x in inputs
                    ]
                )
            else:
                whole = mxprobe_kernels.apply_correction(together, correction, rule=rule).split(sizes)
                corrected.append([q.reshape(x.shape) for q, x in zip(whole, inputs)])
        for i, (measured, gram) in enumerate(zip(batch, grams)):
            parts[i].append(_whatif_sums(measured, gram, [of_batch[i] for of_batch in corrected]))
    for measured, sums_of in zip(batch, parts):
        shared = {name: measured.row[name] for name in ("n", "out_ref2", "sampled_frac", "n_clusters")}
        yield [
            {"correction": name, **shared, "n_zeroed": round(n_zeroed), **dict(zip(_WHATIF_SUMS, sums))}
            for name, (n_zeroed, *sums) in zip(corrections, torch.cat(sums_of).tolist())
        ]


_WHATIF_SUMS = ("sum_e2", "sum_e2_on_d", "out_e2", "out_zeroed2")


def _at_a_time(corrections: Sequence[str], x: torch.Tensor) -> Iterator[Sequence[str]]:
    """On a device as many as `DEVICE_BATCH_ELEMENTS` has room for: each is a tensor as large as x."""
    n = len(corrections) if _on_host(x) else max(DEVICE_BATCH_ELEMENTS // max(x.numel(), 1), 1)
    return (corrections[start : start + n] for start in range(0, len(corrections), n))


def _whatif_sums(measured: Measured, gram: torch.Tensor | None, corrected: list[torch.Tensor]) -> torch.Tensor:
    """[n_corrections, 5], over the experts: zeroed elements, then `_WHATIF_SUMS`.

    ||E B||^2 = <E (B B^T), E>: `gram` is B B^T where that is smaller than B.
    """
    parts: list[torch.Tensor] = []
    for experts, rows in _pieces(measured.fields.x):
        some = measured._replace(
            fields=_of(measured.fields, experts, rows),
            b=measured.b[experts],
            weights=None if measured.weights is None else measured.weights[rows],
        )
        of_some = [q[experts, rows] for q in corrected]
        parts.append(_whatif_sums_of(some, None if gram is None else gram[experts], of_some))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _whatif_sums_of(measured: Measured, gram: torch.Tensor | None, corrected: list[torch.Tensor]) -> torch.Tensor:
    """The same of one piece; as many corrections at a time as memory allows, as one more axis: [E, n, M, C]."""
    fields, b, weights = measured.fields, measured.b, measured.weights
    limit = CPU_BATCH_ELEMENTS if _on_host(fields.x) else DEVICE_BATCH_ELEMENTS
    stride = max(limit // max(fields.x.numel(), 1), 1)
    x, on_d, zeroed = fields.x[:, None], fields.on_d[:, None], fields.zeroed[:, None]
    nonzero = x != 0
    parts: list[torch.Tensor] = []
    for start in range(0, len(corrected), stride):
        q = torch.stack(corrected[start : start + stride], 1)
        e = q.double() - x
        n_zeroed = ((q == 0) & nonzero).sum(-1).double()
        if weights is not None:
            e, n_zeroed = e * weights.sqrt()[:, None], n_zeroed * weights
        both = torch.stack((e, e * zeroed), 1)
        made = product(both.flatten(1, 3), b if gram is None else gram).unflatten(1, both.shape[1:4])
        out = _energies(made) if gram is None else (made * both).flatten(3).sum(-1)
        sums = (n_zeroed.sum(-1), _energies(e), _energies(e * on_d), *out.unbind(1))
        parts.append(torch.stack(sums, -1).sum(0))
    return torch.cat(parts)


def _energies(x: torch.Tensor) -> torch.Tensor:
    """[..., M, C] -> ||x_i||^2 [...]."""
    return torch.linalg.vector_norm(x.flatten(-2), dim=-1).square()


def identity_error(row: Row) -> float:
    """How far a row's components are from its totals, relative to them: the larger of tensor and product.

    ||e||^2 = ||scale||^2 + ||dz||^2 + ||grid||^2 + 2 (<scale, grid> + <scale, dz>)       <dz, grid> = 0
    and for the product, whose components all overlap, with 2 <dz, grid> as well.
    """
    tensor = row["sum_scale2"] + row["sum_dz2"] + row["sum_grid2"] + 2 * (row["sum_scale_grid"] + row["sum_scale_dz"])
    out = row["out_scale2"] + row["out_dz2"] + row["out_grid2"]
    out += 2 * (row["out_scale_dz"] + row["out_scale_grid"] + row["out_dz_grid"])
    return max(_relative(tensor, row["sum_e2"]), _relative(out, row["out_e2"]))


def _relative(parts: float, total: float) -> float:
    return abs(parts - total) / total if total > 0 else abs(parts)
