"""What each correction leaves of the error, operand by operand, against the uncorrected quantizer on the same steps.

A what-if row says what is left by a correction; what there was before is in the tensors table. Both are added over
the rows that have a partner: ratios of sums, not means of ratios.
"""

from typing import Any

import numpy as np

from mxprobe.trace.column_arrays import Array, Indices, codes, names_of, numbers

from . import names
from .operands import Operands, Scan
from .rows import Rows, add_by, all_finite, ratio

LEFT: tuple[str, ...] = ("output", "error", "on_deadzone", "zeroed")
_AFTER = ("n", "n_zeroed", "sum_e2", "sum_e2_on_d", "out_e2", "out_ref2")
_BASE = ("sum_e2", "sum_e2_on_d", "out_e2", "out_ref2")


def collect(whatif: Rows, tensors: Rows, seen: Scan, operands: Operands) -> tuple[list[str], dict[str, Array]]:
    """Return corrections, and (n_operands, n_corrections) arrays named by `LEFT`, NaN where nothing was tried.

    `output`, `error` and `on_deadzone` are energies left, of the GEMM output's error, of the operand's and of its
    part on the deadzone, relative to the uncorrected quantizer; `zeroed` is the fraction of values that become 0.
    """
    found: dict[str, None] = {}
    for piece in whatif.chunks(("correction", "phase")):
        if operands.phase in names_of(piece, "phase"):
            found.update(dict.fromkeys(names_of(piece, "correction")))
    corrections = sorted(found, key=names.natural_key)
    n_operands = len(operands.totals)
    left = {name: np.full((n_operands, len(corrections)), np.nan) for name in LEFT}
    if not corrections or not n_operands:
        return corrections, left
    keys = _Keys(seen, operands)
    base = _base_per_step(tensors, keys, n_operands)
    after = np.zeros((len(_AFTER) + len(_BASE), n_operands * len(corrections)))
    at = {name: i for i, name in enumerate(corrections)}
    for piece in whatif.chunks(("step", "module", "role", "phase", "correction", *_AFTER)):
        operand, position = keys.of(piece)
        correction = codes(piece, "correction", at)
        values = numbers(piece, _AFTER)
        before = base[position, operand]
        paired = (operand >= 0) & (correction >= 0) & all_finite(values) & np.isfinite(before[:, 0])
        key, together = operand * len(corrections) + correction, (values, before.T)
        if not paired.all():
            key, together = key[paired], (values[:, paired], before[paired].T)
        add_by(after[: len(_AFTER)], key, together[0])
        add_by(after[len(_AFTER) :], key, together[1])
    n, n_zeroed, e2, e2_on_d, out2, ref2, *before = after.reshape(-1, n_operands, len(corrections))
    base_e2, base_on_d, base_out2, base_ref2 = before
    left["output"] = ratio(out2 * base_ref2, base_out2 * ref2)
    left["error"] = ratio(e2, base_e2)
    left["on_deadzone"] = ratio(e2_on_d, base_on_d)
    left["zeroed"] = ratio(n_zeroed, n)
    return corrections, left


class _Keys:
    """Rows of `totals` and positions of steps for the rows of a piece."""

    def __init__(self, seen: Scan, operands: Operands) -> None:
        self.seen, self.phase = seen, operands.phase
        self.module_at = {name: i for i, name in enumerate(operands.modules)}
        self.role_at = {name: i for i, name in enumerate(operands.roles)}
        self.row = np.full((len(operands.modules) + 1, len(operands.roles) + 1), -1)
        self.row[operands.totals["module"], operands.totals["role"]] = np.arange(len(operands.totals))

    def of(self, piece: Any) -> tuple[Indices, Indices]:
        """Return (operand, step position), each (n,); operand -1 where a row is of none, or of another phase."""
        operand = self.row[codes(piece, "module", self.module_at), codes(piece, "role", self.role_at)]
        step = piece.column("step").to_numpy()
        if step.dtype.kind == "f":
            step = np.nan_to_num(step, nan=-1).astype(np.int64)
        # Rows of a step stand together: each run of them is looked up once.
        starts = np.flatnonzero(np.concatenate([[True], step[1:] != step[:-1]]))
        found = np.clip(np.searchsorted(self.seen.steps, step[starts]), 0, len(self.seen.steps) - 1)
        is_seen = self.seen.steps[found] == step[starts]
        lengths = np.diff(np.append(starts, step.size))
        position = np.repeat(found, lengths)
        known = np.repeat(is_seen, lengths) & (codes(piece, "phase", {self.phase: 0}) == 0)
        return np.where(known, operand, -1), position


def _base_per_step(tensors: Rows, keys: _Keys, n_operands: int) -> Array:
    """Return (steps, operands, sums) of the uncorrected quantizer; NaN where an operand was not measured.

    Means over ranks and micro steps, so that each what-if row of a step has the same partner.
    """
    n_steps = len(keys.seen.steps)
    sums = np.zeros((len(_BASE) + 1, n_operands * n_steps))
    for piece in tensors.chunks(("step", "module", "role", "phase", *_BASE)):
        operand, position = keys.of(piece)
        values = numbers(piece, _BASE)
        usable = (operand >= 0) & all_finite(values)
        counted = np.concatenate([values[:, usable], np.ones((1, int(usable.sum())))])
        add_by(sums, position[usable] * n_operands + operand[usable], counted)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums[:-1] / np.where(sums[-1] > 0, sums[-1], np.nan)
    return np.ascontiguousarray(mean.reshape(len(_BASE), n_steps, n_operands).transpose(1, 2, 0))
