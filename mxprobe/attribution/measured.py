"""Frames -> arrays over [clusters T, modules M, ...], the form in which decisions are made and resampled.

A cluster is a probed step, summed over ranks and micro steps. Above 64 of them, consecutive steps are pooled
into 64 blocks: a block bootstrap, which respects that neighbouring steps are alike, at a bounded cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.schema import Phase, Role
from mxprobe.trace import Trace
from mxprobe.trace.aggregation import BIN, Aggregation
from mxprobe_kernels.recipe_grammar import Operand

from .explained import ExplainedMismatch, explained_mismatch
from .sensitivity_ranks import MIN_MICROBATCHES, is_valid, operand_sensitivity, validity
from .token_mismatch import Sides, both_sides
from .windows import last_steps

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

FORWARD_ROLES: tuple[Role, ...] = (Role.X_FWD, Role.W_FWD)
MAX_CLUSTERS = 64

_ROLE_INDEX = {role.value: index for index, role in enumerate(FORWARD_ROLES)}
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
_OUTPUTS = (
    *("step", "n_steps", "last_step", "module", "phase", "recipe_x", "recipe_w", "exact"),
    *("ref2", "realised2", "predicted2", "residual2"),
)
_WHATIF_SUMS = ("sum_e2_on_d", "out_ref2", "out_e2", "out_zeroed2")


@dataclass(frozen=True)
class OutputSums:
    """One phase of `outputs`: sums [T, M], 0 where a module was not measured, and the recipe of each module."""

    ref2: Array
    realised2: Array
    predicted2: Array
    residual2: Array
    recipes: tuple[tuple[str, str], ...]
    """(recipe_x, recipe_w) most often inferred per module; ("", "") where none was measured."""
    is_exact: npt.NDArray[np.bool_]
    """[M]: nine in ten rows reproduce y exactly under that recipe."""
    n_steps: int
    """Probed steps with rows in this phase, those that were added up since included."""

    def realised(self, weights: Array) -> Array:
        """Return [M] realised output error relative to the exact product; NaN where not measured."""
        return divide(weights @ self.realised2, weights @ self.ref2)

    def predicted(self, weights: Array) -> Array:
        """Return [M] output error that the inferred recipe predicts."""
        return divide(weights @ self.predicted2, weights @ self.ref2)

    def unexplained(self, weights: Array | None = None) -> Array:
        """Return [M] part of the realised error that the recipe's own rounding leaves unexplained.

        NaN without an error.
        """
        weights = np.ones(len(self.residual2)) if weights is None else weights
        return divide(weights @ self.residual2, weights @ self.realised2)


@dataclass(frozen=True)
class Cut:
    """The operands N of a mask, cut out of `OperandSums`: `base` [T, N]; `before`, `after`, `measured` [C, T, N].

    `before` is what the run does now; it and the output errors of `after` are 0 where a correction was not measured.
    """

    base: dict[str, Array]
    before: dict[str, Array]
    after: dict[str, Array]
    measured: npt.NDArray[np.bool_]


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
    delta2: Array | None = None
    """[M, R] sensitivity of the policy to each operand's error, NaN where not measured; None without replays."""
    _cuts: dict[bytes, Cut] = field(default_factory=dict[bytes, Cut], repr=False, compare=False)

    def cut(self, mask: npt.NDArray[np.bool_]) -> Cut:
        """Return the sums of the operands in `mask` [M, R]. The last one is kept: resamples mostly choose alike."""
        key = mask.tobytes()
        if key not in self._cuts:
            after = {name: np.ascontiguousarray(values[..., mask]) for name, values in self.whatif.items()}
            measured = after["out_ref2"] > 0
            for name in ("out_e2", "out_zeroed2"):
                after[name] *= measured
            before = {name: values[:, mask] * measured for name, values in self.current.items()}
            base = {name: values[:, mask] for name, values in self.base.items()}
            self._cuts.clear()
            self._cuts[key] = Cut(base, before, after, measured)
        return self._cuts[key]


@dataclass(frozen=True)
class Measured:
    """All that the verdict engine looks at."""

    steps: Indices
    n_clusters: int
    modules: tuple[str, ...]
    outputs: dict[Phase, OutputSums]
    operands: OperandSums | None
    sides: Sides = field(default_factory=Sides)
    explained: ExplainedMismatch | None = None
    """Where replays can be held against log-probabilities of both sides; None without either."""
    lacks_generation: bool = False
    """A trainer was attached, and nothing in the trace comes from a rollout: how that computes is not known."""

    @property
    def n_steps(self) -> int:
        """Return the probed steps behind the comparison of training and rollout: those of the phase with fewer."""
        return min((sums.n_steps for sums in self.outputs.values()), default=self.steps.size)


def measure(trace: Trace) -> Measured:
    """Read a trace into arrays. Phases are `train` and `rollout`; evaluation is not judged."""
    outputs = trace.table("outputs", _OUTPUTS)
    outputs = outputs[outputs["phase"].isin([Phase.TRAIN.value, Phase.ROLLOUT.value])]
    forward = _forward_operands(trace)
    steps = np.unique(np.concatenate([outputs["step"].to_numpy(), forward.rows["step"].to_numpy()]).astype(np.intp))
    modules = tuple(dict.fromkeys(str(name) for frame in (outputs, forward.rows) for name in frame["module"].unique()))
    n_clusters = min(len(steps), MAX_CLUSTERS)
    axes = _Axes(steps, n_clusters, {name: index for index, name in enumerate(modules)})
    sums = {
        each: _output_sums(rows, axes)
        for each in (Phase.TRAIN, Phase.ROLLOUT)
        if not (rows := outputs[outputs["phase"] == each.value]).empty
    }
    now = sums.get(Phase.ROLLOUT) or sums.get(Phase.TRAIN)
    recipes = now.recipes if now else ()
    operands = None if forward.rows.empty else _operand_sums(trace, forward, recipes, axes)
    last = last_steps(outputs).reindex(steps).fillna(pd.Series(steps, index=steps)).to_numpy(dtype=np.int64)
    sides, rollouts, replays = both_sides(trace, steps, last, n_clusters), trace.rollouts(), trace.replays()
    explained = None if rollouts.empty or replays.empty else explained_mismatch(rollouts, replays, outputs)
    lacks_generation = _is_of_trainer(trace) and Phase.ROLLOUT not in sums and sides.log_probs is None
    return Measured(steps, n_clusters, modules, sums, operands, sides, explained, lacks_generation)


def _is_of_trainer(trace: Trace) -> bool:
    ranks = trace.run.get("ranks")
    places = [trace.run, *(ranks if isinstance(ranks, list) else ())]
    return any(isinstance(place, dict) and place.get("role") == "trainer" for place in places)


def divide(numerator: Array, denominator: Array) -> Array:
    """Return the elementwise quotient; NaN where the denominator is not positive."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


@dataclass(frozen=True)
class _Axes:
    steps: Indices
    n_clusters: int
    module_index: dict[str, int]

    @property
    def bins(self) -> dict[int, int]:
        """Return step -> cluster."""
        return dict(zip(self.steps.tolist(), self._cluster(self.steps).tolist(), strict=True))

    def place(self, rows: pd.DataFrame) -> tuple[Indices, Indices, Indices]:
        """Return [T, M, R] of sums over forward operands."""
        return rows[BIN].to_numpy(dtype=np.intp), self.module(rows), _roles(rows)

    def cluster(self, frame: pd.DataFrame) -> Indices:
        return self._cluster(frame["step"].to_numpy())

    def _cluster(self, step: npt.NDArray[Any]) -> Indices:
        position = np.searchsorted(self.steps, step)
        return (position * self.n_clusters // max(self.steps.size, 1)).astype(np.intp)

    def module(self, frame: pd.DataFrame) -> Indices:
        return _codes(frame["module"], self.module_index)


@dataclass(frozen=True)
class _Forward:
    """Which forward operands a trace has, in the phase that is judged: one row per `step`, `module`, `role`."""

    phase: Phase
    rule: str
    rows: pd.DataFrame


def _forward_operands(trace: Trace) -> _Forward:
    judged = {"role": list(_ROLE_INDEX), "phase": [Phase.ROLLOUT.value, Phase.TRAIN.value]}
    found = trace.sums(Aggregation("tensors", (*_KEYS, "rule"), where=judged))
    in_rollout = found["phase"] == Phase.ROLLOUT.value
    phase = Phase.ROLLOUT if in_rollout.any() else Phase.TRAIN
    rows = found[in_rollout] if in_rollout.any() else found
    by_rule = rows.groupby("rule", observed=True)["n_rows"].sum()
    together = rows[["step", "module", "role"]].drop_duplicates(ignore_index=True)
    return _Forward(phase, str(by_rule.idxmax()) if len(by_rule) else "", together)


def _output_sums(rows: pd.DataFrame, axes: _Axes) -> OutputSums:
    shape = (axes.n_clusters, len(axes.module_index))
    index = (axes.cluster(rows), axes.module(rows))
    recipes, is_exact = _recipes(rows, index[1], shape[1])
    return OutputSums(
        ref2=_sum_into(shape, index, rows["ref2"]),
        realised2=_sum_into(shape, index, rows["realised2"]),
        predicted2=_sum_into(shape, index, rows["predicted2"]),
        residual2=_sum_into(shape, index, rows["residual2"]),
        recipes=recipes,
        is_exact=is_exact,
        n_steps=int(rows.groupby("step")["n_steps"].max().sum()),
    )


def _recipes(
    rows: pd.DataFrame, module: Indices, n_modules: int
) -> tuple[tuple[tuple[str, str], ...], npt.NDArray[np.bool_]]:
    """Return per module the pair of recipes most often inferred, the first seen of equals, and whether it is exact.

    A row that adds up several steps counts as so many.
    """
    frame = pd.DataFrame({name: rows[name].astype("category") for name in ("recipe_x", "recipe_w")})
    frame["module"] = module
    n = rows["n_steps"].to_numpy(dtype=np.int64)
    frame["exact"] = (rows["exact"] == True).to_numpy(dtype=bool) * n  # noqa: E712
    frame["n"] = n
    counts = frame.groupby(["module", "recipe_x", "recipe_w"], observed=True, sort=False)[["n", "exact"]].sum()
    n_rows = np.bincount(module, weights=n, minlength=n_modules)
    recipes = [("", "")] * n_modules
    is_exact = np.zeros(n_modules, dtype=np.bool_)
    most = counts.sort_values("n", ascending=False, kind="stable").reset_index().drop_duplicates("module")
    for position, x, w, exact in zip(most["module"], most["recipe_x"], most["recipe_w"], most["exact"], strict=True):
        recipes[int(position)] = (str(x), str(w))
        is_exact[int(position)] = exact / n_rows[int(position)] >= 0.9
    return tuple(recipes), is_exact


@cache
def correction_of(side: str) -> str:
    """Return the what-if that a side of a recipe amounts to, e.g. `of:0.5` for `mxfp4+of:0.5`.

    "" for `none`, where nothing was measured, and for a spelling that this version does not know.
    """
    try:
        operand = Operand.parse(side)
    except ValueError:
        return ""
    return str(operand.correction or "") if not operand.is_high_precision else ""


def _operand_sums(trace: Trace, forward: _Forward, recipes: tuple[tuple[str, str], ...], axes: _Axes) -> OperandSums:
    shape = (axes.n_clusters, len(axes.module_index), len(FORWARD_ROLES))
    judged = {"role": list(_ROLE_INDEX), "phase": [forward.phase.value]}
    place = (BIN, "module", "role")
    base = {name: np.zeros(shape) for name in _TENSOR_SUMS}
    rows = trace.sums(Aggregation("tensors", place, _TENSOR_SUMS, judged, axes.bins))
    _put_into(base, axes.place(rows), rows)
    corrections = tuple(trace.sums(Aggregation("whatif", ("correction",)))["correction"].dropna().astype(str))
    positions = {name: index for index, name in enumerate(corrections)}
    after = {name: np.zeros((len(corrections), *shape)) for name in _WHATIF_SUMS}
    rows = trace.sums(Aggregation("whatif", ("correction", *place), _WHATIF_SUMS, judged, axes.bins))
    rows = rows[axes.module(rows) >= 0]
    _put_into(after, (_codes(rows["correction"], positions), *axes.place(rows)), rows)
    for column, role in enumerate(FORWARD_ROLES):
        if role is Role.W_FWD:
            _carry_over(base, column)
            _carry_over(after, column)
    n_steps = np.zeros(shape[1:], dtype=np.intp)
    np.add.at(n_steps, (axes.module(forward.rows), _roles(forward.rows)), 1)
    active = np.full(shape[1:], -1, dtype=np.intp)
    for m, r in np.ndindex(len(recipes), len(FORWARD_ROLES)):
        active[m, r] = positions.get(correction_of(recipes[m][r]), -1)
    current = {name: base[name].copy() for name in ("out_e2", "out_zeroed2")}
    for m, r in np.argwhere(active >= 0):
        for name, values in current.items():
            values[:, m, r] = after[name][active[m, r], :, m, r]
    delta2 = _delta2(trace, axes)
    return OperandSums(forward.phase, forward.rule, corrections, base, after, active, current, n_steps, delta2)


def _delta2(trace: Trace, axes: _Axes) -> Array | None:
    """Return [M, R], or None where too few microbatches were replayed, or no replay says that first order holds."""
    sensitivity = trace.sensitivity()
    if not is_valid(validity(sensitivity, trace.replays())):
        return None
    rows = operand_sensitivity(sensitivity)
    rows = rows[rows["n_microbatches"] >= MIN_MICROBATCHES]
    known = axes.module(rows) >= 0
    if not known.any():
        return None
    rows = rows[known]
    found = np.full((len(axes.module_index), len(FORWARD_ROLES)), np.nan)
    found[axes.module(rows), _roles(rows)] = rows["delta2"].to_numpy(dtype=float)
    return found


def _roles(frame: pd.DataFrame) -> Indices:
    return _codes(frame["role"], _ROLE_INDEX)


def _codes(names: pd.Series, index: Mapping[str, int]) -> Indices:
    """Return the position of each name in the index, -1 where it has none; one look-up per distinct name."""
    encoded = names.astype("category").cat
    table = np.array([*(index.get(str(name), -1) for name in encoded.categories), -1], dtype=np.intp)
    return table[encoded.codes.to_numpy()]


def _sum_into(shape: Sequence[int], index: tuple[Indices, ...], values: pd.Series) -> Array:
    total = np.zeros(shape)
    numbers = values.to_numpy(dtype=np.float64)
    np.add.at(total, index, np.where(np.isfinite(numbers), numbers, 0.0))
    return total


def _put_into(totals: dict[str, Array], index: tuple[Indices, ...], rows: pd.DataFrame) -> None:
    """Set totals[name][index] to the column of that name, missing as 0."""
    for name, total in totals.items():
        total[index] = rows[name].fillna(0.0).to_numpy()


def _carry_over(sums: dict[str, Array], column: int) -> None:
    """Fill clusters in which an operand was not measured from the last one before, else the first one after."""
    measured = sums["out_ref2"][..., column] > 0  # [..., T, M]
    order = np.arange(measured.shape[-2])[:, None]
    last = np.maximum.accumulate(np.where(measured, order, -1), axis=-2)
    first = np.where(measured.any(axis=-2), measured.argmax(axis=-2), 0)[..., None, :]
    source = np.where(last >= 0, last, first)
    for values in sums.values():
        values[..., column] = np.take_along_axis(values[..., column], source, axis=-2)
