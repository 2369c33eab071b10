"""One operand of one GEMM: the decomposition of its rounding error, and of the error it makes in the product.

    A [M, C]  the operand, quantized in blocks along the contraction axis C
    B [C, N]  the other operand, exact
    error of the product, component by component: (e_scale + e_dz + e_grid) B

Rows that were not all as likely to be measured carry weights: w_r multiplies what row r adds to a sum, so that a matrix
of which row r is sqrt(w_r) times as large has the weighted sums, products included.

Pure functions on tensors. Products are float64: TF32 and reduced-precision settings belong to the user, and do
not reach float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import mxprobe_kernels
from mxprobe.events import Event
from mxprobe.schema import OUTPUT_SUMS, Role, Row
from mxprobe_kernels import cpu_backend
from mxprobe_kernels.recipe_grammar import Correction
from mxprobe_kernels.torch_backend import ErrorFields

IDENTITY_TOLERANCE = 1e-5
"""Of sum_e2: how far the components of a row may be from their total."""


CPU_BATCH_ELEMENTS = 1 << 16
"""On a CPU, elements handled by one operation: enough to hide its overhead, few enough for the cache."""
DEVICE_BATCH_ELEMENTS = 1 << 18
"""There what an operation makes is to stay small: 8 to 100 bytes each."""


class Operand(NamedTuple):
    """A operand and what it is multiplied with, as matrices."""

    role: Role
    a: torch.Tensor
    """[M, C]"""
    b: torch.Tensor
    """[C, N]"""
    sampled_frac: float
    n_clusters: int
    n_certain: int = 0
    """The last rows, which count `certain_weight` where the others count 1."""
    certain_weight: float = 1.0

    @property
    def n_counted(self) -> float:
        """Rows, each as often as it counts."""
        return self.a.shape[0] + self.n_certain * (self.certain_weight - 1.0)

    @property
    def weights(self) -> torch.Tensor | None:
        """float64 [M], or None where all count 1."""
        if not self.n_certain:
            return None
        weights = torch.ones(self.a.shape[0], dtype=torch.float64, device=self.a.device)
        weights[-self.n_certain :] = self.certain_weight
        return weights


class Measured(NamedTuple):
    """What `measure_operand` hands on to `measure_corrections`."""

    row: Row
    fields: ErrorFields
    b: torch.Tensor
    """float64 [C, N], finite."""
    weights: torch.Tensor | None = None
    """float64 [M]"""

    @property
    def weighted(self) -> ErrorFields:
        """The fields with rows as large as their weights make them."""
        return self.fields if self.weights is None else _times(self.fields, self.weights.sqrt())


def measure_operand(operand: Operand, *, format: str, rule: str) -> Measured:
    """The sums of one row of table `tensors`: energies and counts of A, and `schema.OUTPUT_SUMS` of A B."""
    fields = mxprobe_kernels.error_fields(operand.a, format=format, rule=rule, dim=-1)
    b = operand.b.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    measured = Measured({}, fields, b, operand.weights)
    row: Row = {
        **_tensor_sums(operand, fields, rule),
        **output_sums(measured.weighted, b),
        "sampled_frac": operand.sampled_frac,
        "n_clusters": operand.n_clusters,
    }
    return measured._replace(row=row)


def _tensor_sums(operand: Operand, fields: ErrorFields, rule: str) -> Row:
    """Energies, counts and histograms of A."""

    def of(a: torch.Tensor) -> Row:
        fast = a.device.type == "cpu" and cpu_backend.supports(a)
        of_a = fields if a is operand.a else mxprobe_kernels.error_fields(a, format=fields.format.name, rule=rule)
        sums = mxprobe_kernels.decompose(a, format=fields.format.name, rule=rule) if fast else of_a.decomposition()
        return sums.to_dict()

    if not operand.n_certain:
        return of(operand.a)
    drawn, certain = operand.a[: -operand.n_certain], operand.a[-operand.n_certain :]
    return added(of(drawn), of(certain), operand.certain_weight)


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


def output_sums(fields: ErrorFields, b: torch.Tensor) -> dict[str, float]:
    """Squared norms and inner products of the error of A B by component; b float64 [C, N]."""
    parts = [_output_sums(_of_rows(fields, rows), b) for rows in _few_rows(fields.x)]
    return dict(zip(OUTPUT_SUMS, (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).tolist()))


def _on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def _few_rows(x: torch.Tensor) -> Iterator[slice]:
    """All rows; on a device as many at a time as `DEVICE_BATCH_ELEMENTS` has room for. Sums add up over rows."""
    n, width = x.shape
    stride = n if _on_host(x) else DEVICE_BATCH_ELEMENTS // max(width, 1)
    return (slice(start, start + max(stride, 1)) for start in range(0, max(n, 1), max(stride, 1)))


def _of_rows(fields: ErrorFields, rows: slice) -> ErrorFields:
    """What sums of products read of these rows."""
    names = ("x", "q", "q_star", "on_d", "zeroed", "saturated")
    return fields._replace(**{name: getattr(fields, name)[rows] for name in names})


def _output_sums(fields: ErrorFields, b: torch.Tensor) -> torch.Tensor:
    e = fields.e
    parts = [fields.x, fields.e_scale, fields.e_dz, fields.e_grid, e * fields.zeroed]
    if not fields.rule.covers_amax:
        parts.append(e * fields.saturated)
    products = [part.flatten() for part in (torch.cat(parts) @ b).chunk(len(parts))]
    ref, scale, deadzone, grid, zeroed = products[:5]
    total = scale + deadzone + grid
    saturated = products[5] if len(products) > 5 else torch.zeros_like(ref)
    pairs = (
        (ref, ref),
        (total, total),
        (scale, scale),
        (deadzone, deadzone),
        (grid, grid),
        (scale, deadzone),
        (scale, grid),
        (deadzone, grid),
        (zeroed, zeroed),
        (saturated, saturated),
    )
    return torch.stack([torch.dot(u, v) for u, v in pairs])


def measure_corrections(batch: Sequence[Measured], corrections: Sequence[str]) -> Iterator[list[Row]]:
    """For each operand, one row of table `whatif` per correction: what A and A B would lose under it.

    All operands of the batch have the same contraction length C, so that their rows can be corrected in one call.
    Elements of blocks with a NaN or an infinity are left out, as everywhere. NVFP4's tensor scale comes from the
    sampled rows, the largest of which may be smaller than the tensor's.
    """
    if not corrections:
        return
    sizes = [len(m.fields.x) for m in batch]
    inputs = [m.fields.x.float() for m in batch]
    together = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    rule = batch[0].fields.rule
    grams = [m.b @ m.b.T if m.b.shape[0] < m.b.shape[1] else None for m in batch]
    parts: list[list[torch.Tensor]] = [[] for _ in batch]
    for some in _at_a_time(corrections, together):
        corrected: list[Sequence[torch.Tensor]] = []
        for correction in some:
            if Correction.parse(correction).needs_whole_tensor:
                corrected.append([mxprobe_kernels.apply_correction(x, correction, rule=rule) for x in inputs])
            else:
                corrected.append(mxprobe_kernels.apply_correction(together, correction, rule=rule).split(sizes))
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
    """[n_corrections, 5]: zeroed elements, then `_WHATIF_SUMS`; as many corrections at a time as memory allows.

    ||E B||^2 = <E (B B^T), E>: `gram` is B B^T where that is smaller than B.
    """
    parts: list[torch.Tensor] = []
    for rows in _few_rows(measured.fields.x):
        weights = None if measured.weights is None else measured.weights[rows]
        some = measured._replace(fields=_of_rows(measured.fields, rows), weights=weights)
        parts.append(_whatif_sums_of(some, gram, [q[rows] for q in corrected]))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _whatif_sums_of(measured: Measured, gram: torch.Tensor | None, corrected: list[torch.Tensor]) -> torch.Tensor:
    fields, b, weights = measured.fields, measured.b, measured.weights
    limit = CPU_BATCH_ELEMENTS if _on_host(fields.x) else DEVICE_BATCH_ELEMENTS
    stride = max(limit // max(fields.x.numel(), 1), 1)
    nonzero = fields.x != 0
    parts: list[torch.Tensor] = []
    for start in range(0, len(corrected), stride):
        q = torch.stack(corrected[start : start + stride])
        e = q.double() - fields.x
        n_zeroed = ((q == 0) & nonzero).sum(2).double()
        if weights is not None:
            e, n_zeroed = e * weights.sqrt()[:, None], n_zeroed * weights
        both = torch.stack((e, e * fields.zeroed))
        out = _energies(both @ b) if gram is None else ((both @ gram) * both).flatten(2).sum(-1)
        parts.append(torch.stack((n_zeroed.sum(1), _energies(e), _energies(e * fields.on_d), *out), 1))
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


def identity_event(key: Mapping[str, Any], row: Row) -> Event | None:
    """Return an event where the components of an operand do not add up to its total error."""
    gap = identity_error(row)
    if gap <= IDENTITY_TOLERANCE:
        return None
    return Event("identity", key["module"], "violated", {"role": key["role"], "gap": gap})
