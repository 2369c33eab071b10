"""Layer outputs of a trace: realised and predicted error per module and phase, and the mismatch per step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mxprobe.schema import Phase
from mxprobe.trace.column_arrays import Array, Indices, codes, names_of, numbers

from . import packing
from .rows import Rows, add_by, ratio

LABELS = {Phase.TRAIN.value: "training", Phase.ROLLOUT.value: "rollout", Phase.EVAL.value: "evaluation"}
_PHASES = tuple(LABELS)
_SUMS = ("ref2", "realised2", "predicted2")
MAX_FLOATS = 60_000
"""Numbers of all bins together that the page gets."""


@dataclass(frozen=True)
class PhaseOutputs:
    """One phase, modules in model order. Errors are relative to ||x W^T||^2, NaN where not measured."""

    phase: str
    module: Indices
    realised: Array
    predicted: Array
    recipe_x: list[str]
    """As last inferred."""
    recipe_w: list[str]
    exact: list[bool]
    """Whether the inferred recipe reproduced every row."""
    steps: Indices
    """First step of each bin."""
    binned: Array
    """(ref2, realised2, predicted2; modules; bins)"""


@dataclass(frozen=True)
class Outputs:
    phases: list[PhaseOutputs]
    mismatch: pd.Series
    """Step -> median over modules of |realised error in rollout - in training|; empty where one was not seen."""


def modules_of(rows: Rows) -> list[str]:
    """Return the modules with a row, in order of appearance."""
    return list(dict.fromkeys(name for piece in rows.chunks(("module",)) for name in names_of(piece, "module")))


def collect(rows: Rows, modules: Sequence[str]) -> Outputs:
    """Add up the outputs table over ranks, micro steps and steps: sums first, ratios after."""
    pieces = [piece.column("step").to_numpy() for piece in rows.chunks(("step",))]
    steps = np.unique(np.concatenate(pieces)[np.isfinite(np.concatenate(pieces))]).astype(np.int64) if pieces else []
    sums = _Sums(list(modules), np.asarray(steps, dtype=np.int64))
    for piece in rows.chunks(("step", "module", "phase", "recipe_x", "recipe_w", "exact", *_SUMS)):
        sums.add(piece)
    return Outputs([found for phase in _PHASES if (found := sums.phase(phase)) is not None], sums.mismatch())


@dataclass
class _Sums:
    modules: list[str]
    steps: Indices

    def __post_init__(self) -> None:
        size = len(_PHASES) * len(self.modules)
        self.sums = np.zeros((len(_SUMS), size * len(self.steps)))
        self.n_rows, self.n_inexact = self.counts = np.zeros((2, size))
        self.recipes = np.full((2, size), "", dtype=object)

    def add(self, piece: Any) -> None:
        module = codes(piece, "module", {name: i for i, name in enumerate(self.modules)})
        phase = codes(piece, "phase", {name: i for i, name in enumerate(_PHASES)})
        step = piece.column("step").to_numpy()
        known = (module >= 0) & (phase >= 0) & np.isfinite(step)
        key = (phase * len(self.modules) + module)[known]
        exact = piece.column("exact").fill_null(False).to_numpy()[known]
        add_by(self.counts, key, np.stack([np.ones(key.size), ~exact]))
        for row, name in enumerate(("recipe_x", "recipe_w")):
            texts = names_of(piece, name)
            code = codes(piece, name, {text: i for i, text in enumerate(texts)})[known]
            self.recipes[row][key] = np.array([*texts, ""], dtype=object)[code]
        values = numbers(piece, _SUMS)[:, known]
        finite = np.isfinite(values).all(axis=0)
        position = np.searchsorted(self.steps, step[known][finite].astype(np.int64))
        add_by(self.sums, key[finite] * len(self.steps) + position, values[:, finite])

    def phase(self, name: str) -> PhaseOutputs | None:
        start = _PHASES.index(name) * len(self.modules)
        module = np.flatnonzero(self.n_rows[start : start + len(self.modules)])
        if not module.size:
            return None
        n_steps = len(self.steps)
        sums = self.sums.reshape(len(_SUMS), -1, n_steps)[:, start + module]
        ref2, realised2, predicted2 = sums.sum(axis=2)
        n_bins = packing.display_bins(n_steps, len(_PHASES) * len(self.modules) * len(_SUMS), MAX_FLOATS)
        starts = np.searchsorted(packing.bin_of(n_steps, n_bins), np.arange(n_bins))
        texts = [[str(text) for text in row[start + module]] for row in self.recipes]
        return PhaseOutputs(
            phase=name,
            module=module.astype(np.int64),
            realised=ratio(realised2, ref2),
            predicted=ratio(predicted2, ref2),
            recipe_x=texts[0],
            recipe_w=texts[1],
            steps=self.steps[starts],
            binned=np.add.reduceat(sums, starts, axis=2),
            exact=[not count for count in self.n_inexact[start + module]],
        )

    def mismatch(self) -> pd.Series:
        shape = (len(_PHASES), len(self.modules), len(self.steps))
        ref2, realised2, _ = (sums.reshape(shape) for sums in self.sums)
        realised = ratio(realised2, ref2)
        gap = np.abs(realised[_PHASES.index(Phase.ROLLOUT)] - realised[_PHASES.index(Phase.TRAIN)])
        measured = np.isfinite(gap).any(axis=0)
        median = np.nanmedian(gap[:, measured], axis=0) if measured.any() else np.empty(0)
        return pd.Series(median, index=self.steps[measured], dtype=float)
