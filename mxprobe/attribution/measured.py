"""Frames -> arrays over [clusters T, modules M, ...], the form in which decisions are made and resampled.

A cluster is a probed step, summed over ranks and micro steps. Above 64 of them, consecutive steps are pooled
into 64 blocks: a block bootstrap, which respects that neighbouring steps are alike, at a bounded cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.schema import Phase, Role
from mxprobe.trace import Trace
from mxprobe_kernels.formats import Rule

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

FORWARD_ROLES: tuple[Role, ...] = (Role.X_FWD, Role.W_FWD)
MAX_CLUSTERS = 64

_KEYS = ("step", "module", "role", "phase")
_TENSOR_SUMS = (
    "sum_e2",
    "sum_dz2",
    "out_ref2",
    "out_e2",
    "out_dz2",
    "out_grid2",
    "out_dz_grid",
    "out_zeroed2",
    "out_saturated2",
)
_WHATIF_SUMS = ("sum_e2_on_d", "out_ref2", "out_e2", "out_zeroed2")


@dataclass(frozen=True)
class OutputSums:
    """One phase of `outputs`: sums [T, M], 0 where a module was not measured, and the recipe of each module."""

    ref2: Array
    realised2: Array
    predicted2: Array
    recipes: tuple[tuple[str, str], ...]
    """(recipe_x, recipe_w) most often inferred per module; ("", "") where none was measured."""
    is_exact: npt.NDArray[np.bool_]
    """[M]: nine in ten rows reproduce y exactly under that recipe."""
    steps: Indices
    """Probed steps with rows in this phase."""

    def realised(self, weights: Array) -> Array:
        """[M] realised output error relative to the exact product; NaN where not measured."""
        return divide(weights @ self.realised2, weights @ self.ref2)

    def predicted(self, weights: Array) -> Array:
        """[M] output error that the inferred recipe predicts."""
        return divide(weights @ self.predicted2, weights @ self.ref2)


@dataclass(frozen=True)
class OperandSums:
    """Forward operands of one phase: sums [T, M, R] from `tensors` and [C, T, M, R] from `whatif`.

    W is measured on fewer steps than X. Its rounding error is a fixed bias from step to step, so a cluster
    without it takes over its neighbour's; `n_steps` [M, R] counts true measurements.
    """

    phase: Phase
    rule: str
    corrections: tuple[str, ...]
    base: dict[str, Array]
    """Of the plain quantizer that the trace was made with."""
    whatif: dict[str, Array]
    active: Indices
    """[M, R] index into `corrections` of what the run does already; -1 where that is the plain quantizer."""
    current: dict[str, Array]
    """`out_e2` and `out_zeroed2` as the run makes them now: `whatif` where a correction is active, else `base`."""
    n_steps: Indices


@dataclass(frozen=True)
class Measured:
    """All that the verdict engine looks at."""

    steps: Indices
    n_clusters: int
    modules: tuple[str, ...]
    outputs: dict[Phase, OutputSums]
    operands: OperandSums | None

    @property
    def n_steps(self) -> int:
        """Probed steps behind the comparison of training and rollout: those of the phase with fewer."""
        return min((sums.steps.size for sums in self.outputs.values()), default=self.steps.size)


def measure(trace: Trace) -> Measured:
    """Read a trace into arrays. Phases are `train` and `rollout`; evaluation is not judged."""
    outputs = trace.outputs()
    outputs = outputs[outputs["phase"].isin([Phase.TRAIN.value, Phase.ROLLOUT.value])]
    tensors, phase = _forward_operands(trace.table("tensors", (*_KEYS, "rule", *_TENSOR_SUMS)))
    whatif = trace.table("whatif", (*_KEYS, "correction", *_WHATIF_SUMS))
    whatif = whatif[whatif["role"].isin([role.value for role in FORWARD_ROLES]) & (whatif["phase"] == phase.value)]
    steps = np.unique(np.concatenate([outputs["step"].to_numpy(), tensors["step"].to_numpy()]).astype(np.intp))
    modules = tuple(dict.fromkeys(str(name) for frame in (outputs, tensors) for name in frame["module"].unique()))
    n_clusters = min(len(steps), MAX_CLUSTERS)
    axes = _Axes(steps, n_clusters, {name: index for index, name in enumerate(modules)})
    sums = {
        each: _output_sums(rows, axes)
        for each in (Phase.TRAIN, Phase.ROLLOUT)
        if not (rows := outputs[outputs["phase"] == each.value]).empty
    }
    now = sums.get(Phase.ROLLOUT) or sums.get(Phase.TRAIN)
    recipes = now.recipes if now else ()
    operands = None if tensors.empty else _operand_sums(tensors, whatif, phase, recipes, axes)
    return Measured(steps, n_clusters, modules, sums, operands)


def divide(numerator: Array, denominator: Array) -> Array:
    """Elementwise quotient; NaN where the denominator is not positive."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


@dataclass(frozen=True)
class _Axes:
    steps: Indices
    n_clusters: int
    module_index: dict[str, int]

    def cluster(self, frame: pd.DataFrame) -> Indices:
        position = np.searchsorted(self.steps, frame["step"].to_numpy())
        return (position * self.n_clusters // max(self.steps.size, 1)).astype(np.intp)

    def module(self, frame: pd.DataFrame) -> Indices:
        return _codes(frame["module"], self.module_index)


def _forward_operands(tensors: pd.DataFrame) -> tuple[pd.DataFrame, Phase]:
    forward = tensors[tensors["role"].isin([role.value for role in FORWARD_ROLES])]
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        rows = forward[forward["phase"] == phase.value]
        if not rows.empty:
            return rows, phase
    return forward.iloc[:0], Phase.TRAIN


def _output_sums(rows: pd.DataFrame, axes: _Axes) -> OutputSums:
    shape = (axes.n_clusters, len(axes.module_index))
    index = (axes.cluster(rows), axes.module(rows))
    recipes = [("", "")] * shape[1]
    is_exact = np.zeros(shape[1], dtype=np.bool_)
    for name, group in rows.groupby(rows["module"].astype(str), sort=False):
        pairs = list(zip(group["recipe_x"].astype(str), group["recipe_w"].astype(str), strict=True))
        common = max(dict.fromkeys(pairs), key=pairs.count)
        same = np.array([pair == common for pair in pairs])
        position = axes.module_index[str(name)]
        recipes[position] = common
        is_exact[position] = float(np.mean(same & (group["exact"] == True).to_numpy(dtype=bool))) >= 0.9  # noqa: E712
    return OutputSums(
        ref2=_sum_into(shape, index, rows["ref2"]),
        realised2=_sum_into(shape, index, rows["realised2"]),
        predicted2=_sum_into(shape, index, rows["predicted2"]),
        recipes=tuple(recipes),
        is_exact=is_exact,
        steps=np.unique(rows["step"].to_numpy()).astype(np.intp),
    )


def correction_of(recipe_side: str) -> str:
    """The what-if that a side of a recipe amounts to, "" for `none`.

    `mxfp4+of:0.5` -> `of:0.5`, `mxfp4+floor` -> `rule:floor`, `nvfp4` -> `nvfp4`.
    """
    format, _, how = recipe_side.partition("+")
    if format in ("", "none"):
        return ""
    if not how:
        return format
    return f"rule:{how}" if how in {rule.value for rule in Rule} else how


def _operand_sums(
    tensors: pd.DataFrame,
    whatif: pd.DataFrame,
    phase: Phase,
    recipes: tuple[tuple[str, str], ...],
    axes: _Axes,
) -> OperandSums:
    shape = (axes.n_clusters, len(axes.module_index), len(FORWARD_ROLES))
    index = (axes.cluster(tensors), axes.module(tensors), _roles(tensors))
    base = {name: _sum_into(shape, index, tensors[name]) for name in _TENSOR_SUMS}
    whatif = whatif[whatif["module"].isin(list(axes.module_index)) & whatif["step"].isin(axes.steps)]
    corrections = tuple(str(name) for name in whatif["correction"].unique())
    positions = {name: index for index, name in enumerate(corrections)}
    which = _codes(whatif["correction"], positions)
    whatif_index = (which, axes.cluster(whatif), axes.module(whatif), _roles(whatif))
    after = {name: _sum_into((len(corrections), *shape), whatif_index, whatif[name]) for name in _WHATIF_SUMS}
    for column, role in enumerate(FORWARD_ROLES):
        if role is Role.W_FWD:
            _carry_over(base, column)
            _carry_over(after, column)
    pairs = tensors[["step", "module", "role"]].astype({"module": str, "role": str}).drop_duplicates()
    n_steps = np.zeros(shape[1:], dtype=np.intp)
    np.add.at(n_steps, (axes.module(pairs), _roles(pairs)), 1)
    active = np.full(shape[1:], -1, dtype=np.intp)
    for m, r in np.ndindex(len(recipes), len(FORWARD_ROLES)):
        active[m, r] = positions.get(correction_of(recipes[m][r]), -1)
    current = {name: base[name].copy() for name in ("out_e2", "out_zeroed2")}
    for m, r in np.argwhere(active >= 0):
        for name, values in current.items():
            values[:, m, r] = after[name][active[m, r], :, m, r]
    rules = tensors["rule"].dropna().astype(str)
    rule = rules.mode().iloc[0] if len(rules) else ""
    return OperandSums(phase, rule, corrections, base, after, active, current, n_steps)


def _roles(frame: pd.DataFrame) -> Indices:
    return _codes(frame["role"], {role.value: index for index, role in enumerate(FORWARD_ROLES)})


def _codes(names: pd.Series, index: Mapping[str, int]) -> Indices:
    """Position of each name in the index, -1 where it has none; one look-up per distinct name."""
    encoded = names.astype("category").cat
    table = np.array([*(index.get(str(name), -1) for name in encoded.categories), -1], dtype=np.intp)
    return table[encoded.codes.to_numpy()]


def _sum_into(shape: Sequence[int], index: tuple[Indices, ...], values: pd.Series) -> Array:
    total = np.zeros(shape)
    numbers = values.to_numpy(dtype=np.float64)
    np.add.at(total, index, np.where(np.isfinite(numbers), numbers, 0.0))
    return total


def _carry_over(sums: dict[str, Array], column: int) -> None:
    """Fill clusters in which an operand was not measured from the last one before, else the first one after."""
    measured = sums["out_ref2"][..., column] > 0  # [..., T, M]
    order = np.arange(measured.shape[-2])[:, None]
    last = np.maximum.accumulate(np.where(measured, order, -1), axis=-2)
    first = np.where(measured.any(axis=-2), measured.argmax(axis=-2), 0)[..., None, :]
    source = np.where(last >= 0, last, first)
    for values in sums.values():
        values[..., column] = np.take_along_axis(values[..., column], source, axis=-2)
