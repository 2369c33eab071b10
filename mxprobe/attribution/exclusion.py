"""Which modules to keep out of MXFP4, and what each further one buys: predicted KL against the work that stays.

    KL(kept) = sum over modules not kept of Delta2 / 2, inputs and weights        (first order: effects are added)
    kept in MXFP8: the Delta2 of MXFP8's own error, where the trace holds it; in older traces Delta2 times what MXFP8
    leaves of the operand's error in the GEMM's output, which says less of the policy

Modules are taken greedily by predicted KL per FLOP. The knee is the point farthest below the straight line from nothing
kept to everything kept, both axes from 0 to 1: up to it a share of the work buys more than its share of the KL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mxprobe.schema import Role
from mxprobe_kernels.recipe_grammar import CorrectionKind

from .patterns import exact_patterns
from .ratios import left_by_corrections
from .sensitivity_ranks import OPERAND, operand_sensitivity

BF16, MXFP8 = CorrectionKind.KEEP_HIGH_PRECISION.value, CorrectionKind.MXFP8.value
EXACT, DELTA2, OUTPUT_ERROR = "exact", "delta2", "output_error"
_ROUNDING = 1e-12  # of the sum, below which a difference of its terms is nothing
_FORWARD = (Role.X_FWD.value, Role.W_FWD.value)


@dataclass(frozen=True)
class ExclusionPoint:
    """The state after the k-th module was kept."""

    k: int
    module: str
    """The k-th; "" for k = 0."""
    flops_frac: float
    """Share of the forward GEMM FLOPs of the modules with a sensitivity that is kept."""
    predicted_kl: float
    """Nats per token that remain."""


@dataclass(frozen=True)
class ExclusionCurve:
    keep: str
    """`keep_high_precision` or `mxfp8`: what the kept modules run in."""
    points: tuple[ExclusionPoint, ...]
    knee: int
    """k of the knee."""
    n_microbatches: int
    """Replayed microbatches behind the sensitivities, of the module with fewest."""
    left_by: str
    """What the kept modules' remaining KL rests on: `exact` (BF16: none is left), `delta2` or `output_error`."""
    framework: str
    patterns: tuple[str, ...]
    """The modules up to the knee as the framework spells a list of what to leave out; exactly these."""

    @property
    def kept_in(self) -> str:
        """`BF16` or `MXFP8`."""
        return "BF16" if self.keep == BF16 else self.keep.upper()

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(point.module for point in self.points[1 : self.knee + 1])


def exclusion_curve(
    sensitivity: pd.DataFrame,
    modules: pd.DataFrame,
    *,
    keep: str = BF16,
    tensors: pd.DataFrame | None = None,
    whatif: pd.DataFrame | None = None,
    framework: str = "torch",
) -> ExclusionCurve | None:
    """Return the curve of a trace's frames; None where they do not say enough.

    sensitivity, modules, tensors, whatif: the trace's tables of these names; the last two for `mxfp8` in traces that
    hold no Delta2 of it. Modules of which nothing is known in MXFP8 are left out. Patterns are tested against all
    names in `modules`.
    """
    operands = operand_sensitivity(sensitivity)
    operands = operands[operands["role"].isin(_FORWARD)]
    left, left_by = pd.Series(0.0, index=operands.index), EXACT
    if keep == MXFP8:
        left, left_by = _left_by_delta2(operands, sensitivity), DELTA2
        if left.isna().all():
            left, left_by = _left_by_output(operands, tensors, whatif), OUTPUT_ERROR
    flops = _flops(modules)
    saved: dict[str, float] = {}
    for name, part in operands.assign(saved=operands["predicted_kl"] * (1.0 - left)).groupby("module", observed=True):
        if flops.get(str(name), 0.0) > 0 and part["saved"].notna().all():
            saved[str(name)] = float(part["saved"].sum())
    if not saved:
        return None
    used = operands[operands["module"].isin(list(saved))]
    total, work = float(used["predicted_kl"].sum()), sum(flops[name] for name in saved)
    order = sorted(saved, key=lambda name: -saved[name] / flops[name])
    points = [ExclusionPoint(0, "", 0.0, total)]
    kl, kept = total, 0.0
    for k, name in enumerate(order, start=1):
        kl, kept = kl - saved[name], kept + flops[name]
        points.append(ExclusionPoint(k, name, kept / work, kl if kl > _ROUNDING * total else 0.0))
    knee = knee_of([point.flops_frac for point in points], [point.predicted_kl for point in points])
    chosen = [point.module for point in points[1 : knee + 1]]
    return ExclusionCurve(
        keep=keep,
        points=tuple(points),
        knee=knee,
        n_microbatches=int(used["n_microbatches"].min()),
        left_by=left_by,
        framework=framework,
        patterns=tuple(exact_patterns(framework, chosen, modules["module"].astype(str).unique().tolist())),
    )


def knee_of(x: Sequence[float], y: Sequence[float]) -> int:
    """Return the index of the point farthest below the line from first to last, both axes scaled to [0, 1].

    0 if none is below.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    width, height = xs[-1] - xs[0], ys[0] - ys[-1]
    if width <= 0 or height <= 0:
        return 0
    below = 1.0 - (xs - xs[0]) / width - (ys - ys[-1]) / height
    return int(below.argmax()) if below.max() > 1e-9 else 0


def _left_by_delta2(operands: pd.DataFrame, sensitivity: pd.DataFrame) -> pd.Series:
    """Return per operand Delta2 of MXFP8's error over that of its error now; NaN where it was not measured."""
    wider = operand_sensitivity(sensitivity, component=MXFP8).set_index(list(OPERAND))["delta2"]
    own = pd.MultiIndex.from_frame(operands[list(OPERAND)].astype(str))
    wider.index = pd.MultiIndex.from_frame(wider.index.to_frame(index=False).astype(str))
    left = wider.reindex(own).to_numpy(dtype=float) / operands["delta2"].where(operands["delta2"] > 0).to_numpy(float)
    return pd.Series(left, index=operands.index)


def _left_by_output(operands: pd.DataFrame, tensors: pd.DataFrame | None, whatif: pd.DataFrame | None) -> pd.Series:
    """Return per operand the part of its output error that MXFP8 leaves; NaN where it was not measured."""
    nothing = pd.Series(np.nan, index=operands.index)
    if tensors is None or whatif is None:
        return nothing
    left = left_by_corrections(tensors, whatif)
    if MXFP8 not in left:
        return nothing
    own = pd.MultiIndex.from_frame(operands[list(OPERAND)].astype(str))
    return pd.Series(left[MXFP8].clip(0.0, 1.0).reindex(own).to_numpy(), index=operands.index)


def _flops(modules: pd.DataFrame) -> Mapping[str, float]:
    total = modules.groupby(modules["module"].astype(str))["gemm_flops"].sum()
    return dict(zip(total.index.astype(str), total.tolist(), strict=True))
