"""Holds what a live view shows, small however long the run: the latest row per operand, the last points per metric."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from mxprobe.attribution.component import name_component
from mxprobe.attribution.coverage import coverage_of
from mxprobe.attribution.ratios import mismatch_by_step, output_ratios, tensor_ratios, totals
from mxprobe.attribution.thresholds import Thresholds
from mxprobe.schema import COUNTS, ENERGY_SUMS
from mxprobe.tables import OUTPUT_SUMS, TABLES

COLUMNS: dict[str, Sequence[str]] = {
    "tensors": ("step", "module", "role", "phase", *COUNTS, *ENERGY_SUMS, *OUTPUT_SUMS),
    "outputs": ("step", "module", "phase", "ref2", "realised2", "predicted2", "residual2"),
    "signals": ("step", "metric", "raw_key", "value"),
    "overhead": ("step", "step_ns", "probe_ns", "n_dropped", "n_errors"),
    "modules": tuple(name for name, _ in TABLES["modules"]),
    "events": ("step", "kind", "detail"),
}
"""Columns of each table that the view needs."""

METRICS: tuple[tuple[str, str], ...] = (
    ("reward_mean", "reward"),
    ("entropy", "entropy"),
    ("mismatch_logp_abs_mean", "|Δ logp|"),
    ("kl_ref", "KL to reference"),
    ("grad_norm", "gradient norm"),
)
MISMATCH = "mismatch"
_KEPT_POINTS = 400
_RATE_STEPS = 20
_LAYER_KEYS = ["module", "role", "phase"]


@dataclass
class LiveState:
    """Fed with new rows by `update`; read by the view."""

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric -> step -> value, the last 400 steps; `mismatch` is derived from `outputs`."""
    layers: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Sums of the last probed step per module, role and phase."""
    last_step: int | None = None
    probe_ns: int = 0
    step_ns: int = 0
    events: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    coverage: float | None = None
    _outputs: pd.DataFrame = field(default_factory=pd.DataFrame)
    _modules: pd.DataFrame = field(default_factory=pd.DataFrame)
    _recent_step_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_RATE_STEPS))
    _counters: dict[int, tuple[int, int]] = field(default_factory=dict)

    def update_all(self, polled: Sequence[tuple[str, int, pd.DataFrame]]) -> None:
        """Take in what a poll of the trace found: (table, rank, new rows)."""
        for table, rank, rows in polled:
            self.update(table, rank, rows)

    def update(self, table: str, rank: int, rows: pd.DataFrame) -> None:
        """Take in new rows of a table."""
        if rows.empty:
            return
        if "step" in rows and rows["step"].notna().any():
            self.last_step = max(self.last_step or 0, int(rows["step"].max()))
        match table:
            case "tensors":
                self._take_tensors(rows)
            case "outputs":
                self._take_outputs(rows)
            case "signals":
                self._take_signals(rows)
            case "overhead":
                self._take_overhead(rank, rows)
            case "modules":
                self._modules = pd.concat([self._modules, rows.assign(rank=rank)]).drop_duplicates(
                    ["rank", "module"], keep="last"
                )
                self.coverage = coverage_of(self._modules).flops_frac
            case "events":
                self.events.extend(
                    f"step {step:.0f}: {kind} {detail or ''}".rstrip()
                    for step, kind, detail in rows.itertuples(index=False)
                )
            case _:
                raise ValueError(f"the live view takes no table {table!r}")

    @property
    def overhead_frac(self) -> float | None:
        return self.probe_ns / self.step_ns if self.step_ns else None

    @property
    def steps_per_s(self) -> float | None:
        total = sum(self._recent_step_ns)
        return len(self._recent_step_ns) * 1e9 / total if total else None

    @property
    def n_dropped(self) -> int:
        return sum(dropped for dropped, _ in self._counters.values())

    @property
    def n_errors(self) -> int:
        return sum(errors for _, errors in self._counters.values())

    def layer_table(self) -> pd.DataFrame:
        """Return rows by operand: `module`, `role`, `phase`, `output_error`, `zeros`, `component`, `rollout`, `train`.

        The last two are the realised output errors of the module in these phases, NaN where not seen.
        """
        columns = [*_LAYER_KEYS, "output_error", "zeros", "component", "rollout", "train"]
        if self.layers.empty:
            return pd.DataFrame(columns=columns)
        out, tensor = output_ratios(self.layers), tensor_ratios(self.layers)
        table = self.layers[_LAYER_KEYS].astype(str)
        table["output_error"], table["zeros"] = out["out_error"], tensor["zero_frac"]
        shares = zip(out["out_zeroed"], out["out_saturated"], out["out_scale"], out["out_grid"], strict=True)
        names = ("zeroed", "saturated", "scale", "grid")
        table["component"] = [name_component(dict(zip(names, row, strict=True)), Thresholds()).value for row in shares]
        realised = self._realised()
        for phase in ("rollout", "train"):
            table[phase] = [realised.get((module, phase), np.nan) for module in table["module"]]
        return table

    def _realised(self) -> dict[tuple[str, str], float]:
        if self._outputs.empty:
            return {}
        last = self._outputs.drop_duplicates(["module", "phase"], keep="last")
        error = last["realised2"] / last["ref2"].where(last["ref2"] > 0)
        keys = zip(last["module"].astype(str), last["phase"].astype(str), strict=True)
        return dict(zip(keys, error.astype(float), strict=True))

    def _take_tensors(self, rows: pd.DataFrame) -> None:
        rows = rows.astype(dict.fromkeys(_LAYER_KEYS, str))
        if not self.layers.empty:
            rows = pd.concat([self.layers, rows], ignore_index=True)
        newest = rows.groupby(_LAYER_KEYS)["step"].transform("max")
        self.layers = totals(rows[rows["step"] == newest], [*_LAYER_KEYS, "step"])

    def _take_outputs(self, rows: pd.DataFrame) -> None:
        rows = rows.astype({"module": str, "phase": str})
        rows = pd.concat([self._outputs, rows], ignore_index=True) if len(self._outputs) else rows
        for step, value in mismatch_by_step(rows).items():
            self._point(MISMATCH, int(str(step)), float(value))
        # Rows of a step may come in several polls; of older steps only the last row per module is needed.
        recent = rows["step"] >= rows["step"].max() - 1
        is_last = ~rows.duplicated(["module", "phase"], keep="last")
        self._outputs = rows[recent | is_last]

    def _take_signals(self, rows: pd.DataFrame) -> None:
        rows = rows[np.isfinite(rows["value"].to_numpy(dtype=float))]
        wanted = {metric for metric, _ in METRICS}
        for metric, group in rows.groupby(rows["metric"].astype(str)):
            if metric in wanted:
                for step, value in group.groupby("step")["value"].mean().items():
                    self._point(str(metric), int(str(step)), float(value))

    def _take_overhead(self, rank: int, rows: pd.DataFrame) -> None:
        self.probe_ns += int(rows["probe_ns"].sum())
        self.step_ns += int(rows["step_ns"].sum())
        last = rows.iloc[-1]
        self._counters[rank] = (int(last["n_dropped"]), int(last["n_errors"]))
        if rank == min(self._counters):
            self._recent_step_ns.extend(int(value) for value in rows["step_ns"].tail(_RATE_STEPS) if value > 0)

    def _point(self, metric: str, step: int, value: float) -> None:
        points = self.series.setdefault(metric, {})
        points[step] = value
        while len(points) > _KEPT_POINTS:
            del points[next(iter(points))]
