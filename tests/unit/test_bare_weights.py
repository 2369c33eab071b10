"""Weights of modules that no hook sees: their own sums, and no product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.agent.recorder import to_columns
from mxprobe.events import finished
from mxprobe.measuring.operands.bare_weights import copy_weights
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.tables import OUTPUT_SUMS
from mxprobe_kernels import reference

CONFIG = AgentConfig(whatifs=("of:0.5",))


def probe(module: nn.Module) -> ModuleProbe:
    how: dict[str, Any] = {"max_rows": 512, "max_features": 512, "trains": True, "submit": lambda _: None}
    return ModuleProbe("m", module, clock=Clock(), guard=Guard(1, lambda *_: None, lambda: None), **how)


def test_both_roles_of_w_have_its_own_sums_and_a_product_of_nothing():
    module = nn.Linear(96, 64)
    watched = probe(module)
    assert not watched.weights_alone
    (snapshot,) = copy_weights(5, [watched], 512)
    assert isinstance(snapshot, Snapshot)
    assert watched.weights_alone
    with torch.no_grad():
        module.weight.zero_()  # the run goes on
    found: dict[str, list[dict[str, Any]]] = {}
    for table, row in measure_step([snapshot], CONFIG, recipes={}, history=WeightHistory()):
        found.setdefault(table, []).append(finished(row, 100))
    for table, rows in found.items():
        to_columns(table, rows)  # has every column
    assert set(found) == {"tensors", "blocks", "whatif"}
    tensors = {row["role"]: row for row in found["tensors"]}
    w = snapshot.weight.rows
    for role, a in (("w_fwd", w), ("w_dgrad", w.T)):
        values = reference.decompose(a.numpy()).values
        row = tensors[role]
        assert (row["step"], row["sampled_frac"]) == (105, 1.0)
        for name in ("n", "n_zeroed", "sum_x2", "sum_e2", "sum_scale2", "sum_dz2", "sum_grid2"):
            assert row[name] == pytest.approx(values[name], rel=1e-6), (role, name)
        assert {row[name] for name in OUTPUT_SUMS} == {0.0}
    (of_forward,) = (row for row in found["whatif"] if row["role"] == "w_fwd")
    assert of_forward["sum_e2"] == pytest.approx(0.25 * tensors["w_fwd"]["sum_e2"], rel=0.05)
    assert (of_forward["out_e2"], of_forward["out_ref2"]) == (0.0, 0.0)


def test_weights_that_are_no_plain_matrix_are_left_out():
    class Odd(nn.Linear):
        pass

    module = Odd(8, 8)
    module.weight = nn.Parameter(torch.zeros(2, 4, 8))
    watched = probe(module)
    assert list(copy_weights(1, [watched], 512)) == []
    assert not watched.weights_alone
