"""What the operands of a step would lose under corrections: rows of table `whatif`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

import mxprobe_kernels
from mxprobe.measuring.operands import pieces
from mxprobe.measuring.operands.operand import Measured, part_of
from mxprobe.measuring.products import product
from mxprobe.schema import Row
from mxprobe_kernels.recipe_grammar import Correction

_SUMS = ("sum_e2", "sum_e2_on_d", "out_e2", "out_zeroed2")


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
    together = torch.cat([x.flatten(0, 1) for x in inputs])
    rule = batch[0].fields.rule

    def corrected(correction: str) -> list[torch.Tensor]:
        """Each input [E, M, C] under a correction."""
        if Correction.parse(correction).needs_whole_tensor:
            how = [[mxprobe_kernels.apply_correction(each, correction, rule=rule) for each in x] for x in inputs]
            return [torch.stack(each) for each in how]
        parts = mxprobe_kernels.apply_correction(together, correction, rule=rule)
        return [q.reshape(x.shape) for q, x in zip(parts.split([x.shape[0] * x.shape[1] for x in inputs]), inputs)]

    grams = [product(m.b, m.b.mT) if m.b.shape[1] < m.b.shape[2] else None for m in batch]
    sums: list[list[torch.Tensor]] = [[] for _ in batch]
    # On a device as many at a time as there is room for: each is a tensor as large as all inputs.
    n = len(corrections) if pieces.on_host(together) else pieces.batch_elements(together) // max(together.numel(), 1)
    for start in range(0, len(corrections), max(n, 1)):
        made = [corrected(correction) for correction in corrections[start : start + max(n, 1)]]
        for i, (measured, gram) in enumerate(zip(batch, grams)):
            sums[i].append(_whatif_sums(measured, gram, [of_batch[i] for of_batch in made]))
    for measured, of_operand in zip(batch, sums):
        shared = {name: measured.row[name] for name in ("n", "out_ref2", "sampled_frac", "n_clusters")}
        yield [
            {"correction": name, **shared, "n_zeroed": round(n_zeroed), **dict(zip(_SUMS, values))}
            for name, (n_zeroed, *values) in zip(corrections, torch.cat(of_operand).tolist())
        ]


def _whatif_sums(measured: Measured, gram: torch.Tensor | None, corrected: list[torch.Tensor]) -> torch.Tensor:
    """Zeroed elements, then `_SUMS`, over the experts: float64 [n_corrections, 5].

    ||E B||^2 = <E (B B^T), E>: `gram` is B B^T where that is smaller than B. As many corrections are taken at a time
    as there is room for, as one more axis: [E, n, M, C].
    """
    total = measured.b.new_zeros(len(corrected), 1 + len(_SUMS))
    for experts, rows in pieces.pieces(measured.fields.x):
        fields = part_of(measured.fields, experts, rows)
        x, on_d, zeroed = fields.x[:, None], fields.on_d[:, None], fields.zeroed[:, None]
        weights = None if measured.weights is None else measured.weights[rows]
        at_once = max(pieces.batch_elements(x) // max(x.numel(), 1), 1)
        for start in range(0, len(corrected), at_once):
            some = slice(start, start + at_once)
            q = torch.stack([each[experts, rows] for each in corrected[some]], 1)
            e = q.double() - x
            n_zeroed = ((q == 0) & (x != 0)).sum(-1).double()
            if weights is not None:
                e, n_zeroed = e * weights.sqrt()[:, None], n_zeroed * weights
            both = torch.stack((e, e * zeroed), 1)
            met = measured.b if gram is None else gram
            made = product(both.flatten(1, 3), met[experts]).unflatten(1, both.shape[1:4])
            out = _energies(made) if gram is None else (made * both).flatten(3).sum(-1)
            sums = (n_zeroed.sum(-1), _energies(e), _energies(e * on_d), *out.unbind(1))
            total[some] += torch.stack(sums, -1).sum(0)
    return total


def _energies(x: torch.Tensor) -> torch.Tensor:
    """[..., M, C] -> ||x_i||^2 [...]."""
    return torch.linalg.vector_norm(x.flatten(-2), dim=-1).square()
