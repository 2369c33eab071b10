"""One weight -> rows of `tensors` and `whatif`, streamed: memory holds two slabs of rows, never the tensor.

| role    | consumed by        | blocks along |
|---------|--------------------|--------------|
| w_fwd   | forward  Y = X W^T | in-features  |
| w_dgrad | dgrad   dX = G W   | out-features |

The sums of the decomposition are exact over all elements. What-ifs are measured on rows (columns) drawn evenly
and stated for the whole tensor by the ratio estimator: error(c) = error(sample under c) / error(sample) x error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from mxprobe.schema import Role, Row
from mxprobe.tables import OUTPUT_SUMS
from mxprobe_kernels import Decomposition, apply_correction, decompose, error_fields
from mxprobe_kernels.formats import get_format

from .settings import ScanSettings
from .spacing import evenly
from .stored_weights import Weight

SLAB_ELEMENTS = 1 << 23
MAX_SAMPLED_EXPERTS = 8
MIN_SAMPLED_LINES = 8


@dataclass
class _Direction:
    """One role of a weight. `dim` is the block axis within a slab [rows, columns]."""

    role: Role
    dim: int
    total: Decomposition | None = None
    sample: list[torch.Tensor] = field(default_factory=list)
    """[lines, K]: sampled lines of whole blocks, contraction axis last."""


def measure_weight(
    weight: Weight, settings: ScanSettings, on_bytes: Callable[[int], None]
) -> tuple[list[Row], list[Row]]:
    """Return rows (without their key) of `tensors` and of `whatif`. UsageError when the file cannot be read to the end.

    `on_bytes` is told how many bytes each slab had.
    """
    along_in = 0 if weight.is_transposed else -1
    directions = (_Direction(Role.W_FWD, along_in), _Direction(Role.W_DGRAD, -1 - along_in))
    sampled = set(evenly(weight.n_matrices, MAX_SAMPLED_EXPERTS))
    for matrix in range(weight.n_matrices):
        columns: list[torch.Tensor] = []
        wants_sample = bool(settings.whatifs) and matrix in sampled
        for slab, first_row in _slabs(weight, matrix, settings):
            for direction in directions:
                part = decompose(slab, format=settings.format, rule=settings.rule, dim=direction.dim)
                direction.total = part if direction.total is None else direction.total + part
            if wants_sample:
                _take(slab, first_row, weight, settings, len(sampled), directions, columns)
            on_bytes(slab.numel() * slab.element_size())
        if columns:
            next(d for d in directions if d.dim == 0).sample.append(torch.cat(columns).t())
    tensors = [_tensor_row(direction, weight) for direction in directions]
    whatifs = [row for direction in directions for row in _whatif_rows(direction, weight, settings)]
    return tensors, whatifs


def _slabs(weight: Weight, matrix: int, settings: ScanSettings) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield whole rows in multiples of the block, so that no block is cut either way; a tensor scale wants all."""
    format = get_format(settings.format)
    height = max(SLAB_ELEMENTS // max(weight.n_columns, 1) // format.block, 1) * format.block
    if format.tensor_scale:
        height = weight.n_rows
    begin = matrix * weight.n_rows
    starts = range(0, weight.n_rows, height)

    def read(first: int) -> torch.Tensor:
        return weight.file.read_rows(weight.entry, begin + first, begin + min(first + height, weight.n_rows))

    # The next slab is read while this one is measured.
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(read, 0)
        for first in starts:
            slab = upcoming.result()
            if first != starts[-1]:
                upcoming = reader.submit(read, first + height)
            yield slab, first


def _take(
    slab: torch.Tensor,
    first_row: int,
    weight: Weight,
    settings: ScanSettings,
    n_matrices: int,
    directions: tuple[_Direction, ...],
    columns: list[torch.Tensor],
) -> None:
    budget = settings.whatif_elements // n_matrices
    rows = evenly(weight.n_rows, max(budget // weight.n_columns, MIN_SAMPLED_LINES))
    here = [row - first_row for row in rows if first_row <= row < first_row + slab.shape[0]]
    along_rows = next(direction for direction in directions if direction.dim == -1)
    if here:
        along_rows.sample.append(slab[here])
    columns.append(slab[:, evenly(weight.n_columns, max(budget // weight.n_rows, MIN_SAMPLED_LINES))])


def _tensor_row(direction: _Direction, weight: Weight) -> Row:
    total = direction.total
    assert total is not None
    n_lines = weight.n_matrices * (weight.n_rows if direction.dim == -1 else weight.n_columns)
    # A checkpoint has no inputs: output errors are sums over no rows, so 0, and their ratios are undefined.
    outputs = dict.fromkeys(OUTPUT_SUMS, 0.0)
    return {"role": str(direction.role), "sampled_frac": 1.0, "n_clusters": n_lines, **total.to_dict(), **outputs}


def _whatif_rows(direction: _Direction, weight: Weight, settings: ScanSettings) -> Iterator[Row]:
    total = direction.total
    if not direction.sample or total is None:
        return
    x = torch.cat(direction.sample)
    fields = error_fields(x, format=settings.format, rule=settings.rule)
    finite = ~fields.scales.excluded.squeeze(-1)
    keep = finite.repeat_interleave(get_format(settings.format).block, dim=-1)[:, : x.shape[1]]
    values = fields.x * keep
    base = float(fields.e.square().sum())
    base_on_d = float((fields.e.square() * fields.on_d).sum())
    expansion = total.n / max(int(keep.sum()), 1)
    for correction in settings.whatifs:
        q = apply_correction(x, correction, rule=settings.rule).double().nan_to_num_(nan=0.0) * keep
        error = (q - values).square()
        yield {
            "role": str(direction.role),
            "correction": correction,
            "sampled_frac": x.numel() / weight.entry.n_elements,
            "n_clusters": x.shape[0],
            "n": total.n,
            "n_zeroed": round(float(((q == 0) & (values != 0)).sum()) * expansion),
            "sum_e2": _scaled(float(error.sum()), base, total.sum_e2, expansion),
            "sum_e2_on_d": _scaled(float((error * fields.on_d).sum()), base_on_d, total.sum_e2_on_d, expansion),
            **dict.fromkeys(("out_ref2", "out_e2", "out_zeroed2"), 0.0),
        }


def _scaled(sample: float, base: float, total: float, expansion: float) -> float:
    """Apply the ratio estimator; plain expansion where the uncorrected sample has no error (weights on the grid)."""
    return sample / base * total if base > 0 else sample * expansion
