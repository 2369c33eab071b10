"""Operands of a trace: sums per module and role, over the whole trace and per displayed bin of steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.attribution import ratios
from mxprobe.schema import DELTA_BINS, Phase, Role
from mxprobe.trace.column_arrays import Array, Indices, codes, names_of, numbers

from . import names, packing
from .rows import Rows, add_by, all_finite

SUMS: tuple[str, ...] = ratios.ADDITIVE
IDENTITY_TOLERANCE = 1e-5
"""Part of ||e||^2 by which the components of a row may miss it."""
LINE_SUMS: tuple[str, ...] = (
    *("n", "n_zeroed", "n_saturated", "sum_x2", "sum_e2", "sum_dz2", "sum_grid2"),
    *("out_ref2", "out_e2", "out_dz2", "out_grid2", "out_dz_grid", "out_zeroed2", "out_saturated2"),
)
"""Sums behind the lines over steps, which is all that a single rank is kept of."""
N_LINES = 13
"""Numbers per operand and bin that the page gets, see `explorer.lines`."""
_IDENTITY = ("sum_e2", "sum_scale2", "sum_dz2", "sum_grid2", "sum_scale_grid", "sum_scale_dz")
_ROLES = tuple(role.value for role in Role)


@dataclass(frozen=True)
class Binned:
    """Sums over bins of steps. `sums` has one row per (`operand`, `bin`) with data; `steps` are the bins' first."""

    label: str
    steps: Indices
    sums: pd.DataFrame


@dataclass(frozen=True)
class Scan:
    """First pass over the tensors table: what is in it. `steps` and `ranks` are of the main phase."""

    modules: tuple[str, ...]
    phases: tuple[str, ...]
    phase: str
    steps: Indices
    ranks: tuple[int, ...]
    n_rows: int


@dataclass(frozen=True)
class Operands:
    """Operands that were measured, in model order, then role order.

    `totals` has one row per operand: `module` and `role` (positions in `modules` and `roles`), the sums of
    `SUMS`, `sampled_frac`, `n_clusters`, `format`, `rule`. `binned` has the same sums over bins of steps, `ranks`
    the sums of `LINE_SUMS` for each rank where there are several. `delta` is (n_operands, 32) int64.
    """

    modules: list[str]
    roles: list[str]
    totals: pd.DataFrame
    binned: Binned
    ranks: tuple[Binned, ...]
    ranks_measured: tuple[int, ...]
    delta: npt.NDArray[np.int64]
    n_probed_steps: int
    phases: tuple[str, ...]
    phase: str
    n_rows: int
    n_bad_rows: int
    """Rows left out: a sum is missing or not finite, or the operand is unknown."""
    first_nonfinite: tuple[int, str, str] | None
    """Step, module and role of the first row with NaN or infinite values in its tensor."""
    n_identity_violations: int
    """Rows whose components miss the total by more than `IDENTITY_TOLERANCE`."""

    @property
    def is_downsampled(self) -> bool:
        return len(self.binned.steps) < self.n_probed_steps

    @property
    def quantizers(self) -> list[str]:
        """Formats and scale rules of the statistics, as in `mxfp4 rceil`."""
        return sorted({f"{f} {r}" for f, r in zip(self.totals["format"], self.totals["rule"], strict=True)})

    def index(self) -> dict[tuple[str, str], int]:
        """Return (module name, role) -> row of `totals`."""
        keys = zip(self.totals["module"], self.totals["role"], strict=True)
        return {(self.modules[int(m)], self.roles[int(r)]): i for i, (m, r) in enumerate(keys)}


def scan(rows: Rows) -> Scan:
    """Return what the tensors table holds; training is the main phase where it was seen."""
    modules: dict[str, None] = {}
    phases: Counter[str] = Counter()
    steps: dict[str, list[Indices]] = {}
    ranks: dict[str, set[int]] = {}
    n_rows = 0
    for piece in rows.chunks(("step", "module", "phase")):
        n_rows += piece.num_rows
        modules.update(dict.fromkeys(names_of(piece, "module")))
        step = piece.column("step").to_numpy()
        for name in names_of(piece, "phase"):
            inside = codes(piece, "phase", {name: 0}) == 0
            phases[name] += int(inside.sum())
            here = step[inside]
            steps.setdefault(name, []).append(np.unique(here[np.isfinite(here)]).astype(np.int64))
            ranks.setdefault(name, set()).update(np.unique(piece.column("rank").to_numpy()[inside]).tolist())
    phase = Phase.TRAIN.value if Phase.TRAIN.value in phases else max(phases, key=phases.__getitem__, default="")
    found = np.unique(np.concatenate(steps[phase])) if phase else np.empty(0, np.int64)
    return Scan(tuple(modules), tuple(phases), phase, found, tuple(sorted(ranks.get(phase, ()))), n_rows)


def collect(rows: Rows, seen: Scan, modules: Sequence[str], *, n_pages: int = 1) -> Operands:
    """Add up the tensors table. `modules` are all names of the page in model order (a superset).

    `n_pages` is how many runs share the page and its limit on numbers.
    """
    sums = _Sums(seen, modules, n_pages)
    columns = ("step", "module", "role", "phase", "format", "rule", "sampled_frac", "n_clusters", "delta_hist", *SUMS)
    for piece in rows.chunks(columns):
        sums.add(piece)
    return sums.finish()


class _Sums:
    """Accumulators over all pieces, dense over module x role x bin."""

    def __init__(self, seen: Scan, modules: Sequence[str], n_pages: int) -> None:
        self.seen, self.modules = seen, list(modules)
        self.module_at = {name: i for i, name in enumerate(modules)}
        self.role_at = {name: i for i, name in enumerate(_ROLES)}
        n_steps, n_operands = len(seen.steps), max(len(set(seen.modules)) * len(_ROLES), 1)
        share = 2 if len(seen.ranks) > 1 else 1
        self.n_bins = packing.display_bins(n_steps, n_operands * N_LINES * n_pages * share)
        self.bins = packing.bin_of(n_steps, self.n_bins)
        self.shown_ranks = _shown_ranks(seen, n_operands * N_LINES * n_pages * share)
        per_rank = packing.MAX_SERIES_FLOATS // (n_operands * N_LINES * n_pages * share * max(len(self.shown_ranks), 1))
        self.n_rank_bins = min(self.n_bins, max(per_rank, 1))
        self.rank_bins = packing.bin_of(n_steps, self.n_rank_bins)
        size = max(len(self.modules), 1) * len(_ROLES)
        self.size = size
        self.binned = np.zeros((len(SUMS) + 1, size * max(self.n_bins, 1)))
        self.by_rank = np.zeros((len(LINE_SUMS) + 1, max(len(self.shown_ranks), 1) * size * max(self.n_rank_bins, 1)))
        self.delta = np.zeros((size, DELTA_BINS), dtype=np.int64)
        self.extra = np.zeros((2, size))
        self.clusters = np.full(size, np.inf)
        self.last = {name: np.full(size, "", dtype=object) for name in ("format", "rule")}
        self.has_step = np.zeros(n_steps, dtype=np.bool_)
        self.n_bad = self.n_violations = 0
        self.nonfinite: tuple[int, str, str] | None = None

    def add(self, piece: Any) -> None:
        in_phase = codes(piece, "phase", {self.seen.phase: 0}) == 0
        self._note_nonfinite(piece, in_phase)
        values = numbers(piece, SUMS)
        module, role = codes(piece, "module", self.module_at), codes(piece, "role", self.role_at)
        step = piece.column("step").to_numpy()
        good = in_phase & (module >= 0) & (role >= 0) & np.isfinite(step) & all_finite(values)
        self.n_bad += int(in_phase.sum() - good.sum())
        if not good.any():
            return
        values = np.concatenate([values if good.all() else values[:, good], np.ones((1, int(good.sum())))])
        operand = module[good] * len(_ROLES) + role[good]
        position = np.searchsorted(self.seen.steps, step[good].astype(np.int64))
        self.has_step[position] = True
        add_by(self.binned, operand * self.n_bins + self.bins[position], values)
        self._add_rank(piece.column("rank").to_numpy()[good], operand, position, values)
        self._add_descriptions(piece, good, operand)
        self.n_violations += _violations(values)

    def _add_rank(self, rank: Indices, operand: Indices, position: Indices, values: Array) -> None:
        if not self.shown_ranks:
            return
        table = np.full(max(self.seen.ranks) + 1, -1)
        table[list(self.shown_ranks)] = np.arange(len(self.shown_ranks))
        shown = table[rank] >= 0
        key = (table[rank] * self.size + operand) * self.n_rank_bins + self.rank_bins[position]
        chosen = [*(SUMS.index(name) for name in LINE_SUMS), len(SUMS)]
        add_by(self.by_rank, key[shown], values[chosen][:, shown])

    def _add_descriptions(self, piece: Any, good: npt.NDArray[np.bool_], operand: Indices) -> None:
        sampled = np.nan_to_num(numbers(piece, ("sampled_frac",))[:, good], nan=1.0)
        add_by(self.extra, operand, np.concatenate([sampled, np.ones_like(sampled)]))
        clusters = numbers(piece, ("n_clusters",))[0, good]
        np.minimum.at(self.clusters, operand, np.nan_to_num(clusters, nan=np.inf))
        for name, last in self.last.items():
            known = names_of(piece, name)
            code = codes(piece, name, {text: i for i, text in enumerate(known)})[good]
            if len(known) == 1 and code.min() == 0:
                last[np.bincount(operand, minlength=self.size) > 0] = known[0]
            else:
                last[operand] = np.array([*known, ""], dtype=object)[code]
        histograms = piece.column("delta_hist").combine_chunks()
        counts = histograms.flatten().fill_null(0).to_numpy().reshape(-1, DELTA_BINS)
        valid = histograms.is_valid().to_numpy(zero_copy_only=False)
        chosen = good[valid]
        _add_rows(self.delta, operand[valid[good]], counts if chosen.all() else counts[chosen])

    def _note_nonfinite(self, piece: Any, in_phase: npt.NDArray[np.bool_]) -> None:
        hit = np.flatnonzero((np.nan_to_num(numbers(piece, ("n_nonfinite",))[0]) > 0) & in_phase)
        if not hit.size:
            return
        step = piece.column("step").to_numpy()[hit]
        first = int(hit[np.argmin(step)])
        if self.nonfinite is None or step.min() < self.nonfinite[0]:
            module, role = (str(piece.column(name)[first].as_py()) for name in ("module", "role"))
            self.nonfinite = (int(step.min()), module, role)

    def finish(self) -> Operands:
        shape = (len(SUMS) + 1, self.size, max(self.n_bins, 1))
        binned = self.binned.reshape(shape)
        present = np.flatnonzero(binned[-1].sum(axis=1) > 0)
        roles_present = sorted({int(i) % len(_ROLES) for i in present})
        roles = [_ROLES[i] for i in roles_present]
        totals = pd.DataFrame(dict(zip(SUMS, binned[:-1, present].sum(axis=2), strict=True)))
        totals.insert(0, "module", present // len(_ROLES))
        totals.insert(1, "role", [roles_present.index(int(i) % len(_ROLES)) for i in present])
        with np.errstate(invalid="ignore"):
            totals["sampled_frac"] = (self.extra[0] / self.extra[1])[present]
        totals["n_clusters"] = self.clusters[present]
        for name, last in self.last.items():
            totals[name] = last[present].astype(str)
        n_ranks = max(len(self.shown_ranks), 1)
        by_rank = self.by_rank.reshape(len(LINE_SUMS) + 1, n_ranks, self.size, max(self.n_rank_bins, 1))
        rank_steps = self._bin_steps(self.rank_bins, self.n_rank_bins)
        return Operands(
            modules=self.modules,
            roles=roles,
            totals=totals,
            binned=Binned("all ranks", self._bin_steps(self.bins, self.n_bins), _frame(binned[:, present], SUMS)),
            ranks=tuple(
                Binned(f"rank {rank}", rank_steps, _frame(by_rank[:, i][:, present], LINE_SUMS))
                for i, rank in enumerate(self.shown_ranks)
            ),
            ranks_measured=self.seen.ranks,
            delta=self.delta[present],
            n_probed_steps=int(self.has_step.sum()),
            phases=self.seen.phases,
            phase=self.seen.phase,
            n_rows=self.seen.n_rows,
            n_bad_rows=self.n_bad,
            first_nonfinite=self.nonfinite,
            n_identity_violations=self.n_violations,
        )

    def _bin_steps(self, bins: Indices, n_bins: int) -> Indices:
        if not self.has_step.any():
            return np.empty(0, np.int64)
        return self.seen.steps[np.searchsorted(bins, np.arange(n_bins))]


def _add_rows(totals: npt.NDArray[np.int64], keys: Indices, rows: npt.NDArray[np.int64]) -> None:
    """Do totals[keys[i]] += rows[i] for (n, columns) rows."""
    if not keys.size:
        return
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    totals[ordered[starts]] += np.add.reduceat(rows[order], starts, axis=0)


def _violations(values: Array) -> int:
    """Count the rows (columns of `values`) that miss e = e_scale + e_dz + e_grid; `ratios` has the same per sum."""
    e2, scale2, dz2, grid2, scale_grid, scale_dz = (values[SUMS.index(name)] for name in _IDENTITY)
    gap = np.abs(scale2 + dz2 + grid2 + 2.0 * (scale_grid + scale_dz) - e2)
    return int((gap > IDENTITY_TOLERANCE * e2)[e2 > 0].sum())


def _shown_ranks(seen: Scan, floats_per_bin: int) -> tuple[int, ...]:
    """Return the ranks that can be looked at one by one: none where there is one, else as many as the page can hold."""
    if len(seen.ranks) < 2:
        return ()
    return seen.ranks[: max(packing.MAX_SERIES_FLOATS // max(floats_per_bin, 1), 1)]


def _frame(sums: Array, columns: Sequence[str]) -> pd.DataFrame:
    """Return (columns and a row count, operands, bins) as a frame indexed by the (operand, bin) that have rows."""
    operand, bin = np.nonzero(sums[-1] > 0)
    index = pd.MultiIndex.from_arrays([operand, bin], names=["operand", "bin"])
    return pd.DataFrame({name: sums[i, operand, bin] for i, name in enumerate(columns)}, index=index)


def dense(n_operands: int, binned: Binned, column: pd.Series) -> Array:
    """Return a column indexed by (operand, bin) as (n_operands, n_bins), NaN where nothing was measured."""
    grid = np.full((n_operands, len(binned.steps)), np.nan)
    index = column.index
    grid[index.get_level_values(0).to_numpy(), index.get_level_values(1).to_numpy()] = column.to_numpy(dtype=np.float64)
    return grid


def page_names(seen: Sequence[str], modules: pd.DataFrame) -> list[str]:
    """Return the modules that were seen, in the order of the modules table."""
    return names.in_model_order(seen, [str(name) for name in modules["module"]])
