"""The verdict weighs operands by the KL their error is predicted to make where replays measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxprobe.attribution.component import OperandErrors, groups, name_component, operand_errors, where
from mxprobe.attribution.measured import OperandSums, measure
from mxprobe.attribution.sensitivity_ranks import MIN_MICROBATCHES
from mxprobe.attribution.thresholds import Thresholds
from mxprobe.schema import Component, Phase, Role
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, open_trace

THRESHOLDS = Thresholds()
MODULES = ("layers.0.q_proj", "layers.0.down_proj")


def sums(delta2: np.ndarray | None) -> OperandSums:
    """Two modules whose inputs err alike in size, the first by its deadzone, the second by its grid."""
    shape = (1, 2, 2)
    base = {name: np.zeros(shape) for name in ("out_ref2", "out_e2", "out_dz2", "out_grid2", "out_dz_grid")}
    base |= {name: np.zeros(shape) for name in ("out_zeroed2", "out_saturated2")}
    base["out_ref2"][:] = 1.0
    base["out_e2"][0, :, 0] = base["out_grid2"][0, 1, 0] = 0.1
    base["out_zeroed2"][0, 0, 0] = base["out_dz2"][0, 0, 0] = 0.1
    nothing = np.zeros((2, 2), dtype=np.intp)
    return OperandSums(Phase.ROLLOUT, "rceil", (), base, {}, nothing - 1, {}, nothing, delta2)


def judged(delta2: np.ndarray | None) -> tuple[Component, list[str]]:
    counted = np.array([[True, False], [True, False]])
    errors: OperandErrors = operand_errors(sums(delta2), np.ones(1))
    component = name_component(errors.shares(counted), THRESHOLDS)
    named = where(groups(errors, MODULES, counted, THRESHOLDS), errors, component, THRESHOLDS)
    return component, [group.module_kind for group, _ in named]


def sensitive(first: float, second: float) -> np.ndarray:
    return np.array([[first, np.nan], [second, np.nan]])


def test_without_sensitivities_the_output_error_is_what_counts():
    component, named = judged(None)
    assert component is Component.DEADZONE  # .5 of the whole is enough, and asked first
    assert named == ["q_proj"]


def test_the_component_of_the_operand_that_matters_is_named():
    assert judged(sensitive(1.0, 100.0)) == (Component.GRID, ["down_proj"])
    assert judged(sensitive(100.0, 1.0)) == (Component.DEADZONE, ["q_proj"])


def test_an_operand_without_a_sensitivity_counts_like_the_median_one():
    assert judged(sensitive(np.nan, 3.0)) == judged(None)


def write_sensitivities(directory: Path, n_microbatches: int, replayed_kl: float | None) -> Path:
    """A trace of one module that predicts a KL of .05, with the operands that `measure` wants."""
    with TraceWriter(directory, {"config": {"rule": "rceil"}}) as writer:
        for i in range(n_microbatches):
            row: dict[str, Any] = dict.fromkeys((name for name, _ in TABLES["sensitivity"]), 0)
            row |= {"step": 10 * i, "module": MODULES[0], "role": "x_fwd", "component": "total"}
            row |= {"format": "mxfp4", "rule": "rceil", "n_tokens": 100.0, "n_samples": 4, "sum_delta2": 10.0}
            writer.append("sensitivity", {name: [value] for name, value in row.items()})
            tensor: dict[str, Any] = {"step": 10 * i, "module": MODULES[0], "role": Role.X_FWD.value, "phase": "train"}
            tensor |= {"format": "mxfp4", "rule": "rceil", "out_ref2": 1.0, "out_e2": 0.1}
            writer.append("tensors", {name: [value] for name, value in tensor.items()})
            if replayed_kl is not None:
                arm = {"step": 10 * i, "arm": "q", "sum_kl": replayed_kl * 100.0, "n_tokens": 100.0}
                writer.append("replays", {name: [value] for name, value in arm.items()})
    return directory


@pytest.mark.parametrize(
    ("n_microbatches", "replayed_kl", "counts"),
    [
        (MIN_MICROBATCHES, 0.06, True),
        (MIN_MICROBATCHES - 1, 0.06, False),
        (MIN_MICROBATCHES, 0.5, False),  # the prediction does not hold
        (MIN_MICROBATCHES, None, False),  # nobody has checked it
    ],
)
def test_they_count_once_there_are_enough_and_replays_agree(
    n_microbatches: int, replayed_kl: float | None, counts: bool, tmp_path: Path
):
    operands = measure(open_trace(write_sensitivities(tmp_path / "t", n_microbatches, replayed_kl))).operands
    assert operands is not None
    if not counts:
        assert operands.delta2 is None
    else:
        assert operands.delta2 is not None
        assert operands.delta2[0, 0] == pytest.approx(0.1)
        assert np.isnan(operands.delta2[0, 1])
