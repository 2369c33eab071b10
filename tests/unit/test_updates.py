"""Do updates reach the quantized weights: counts and sums against products written out, ratios, and a real run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.agent.parts.versions import Versions
from mxprobe.attribution.update_visibility import update_ratios, update_visibility
from mxprobe.attribution.words import update_words
from mxprobe.measuring.versions.weight_updates import near_boundary, update_row
from mxprobe.tables import TABLES
from tests import part_context

BLOCK = [6.0, *[1.0] * 31]  # s = 1


def block(**changed: float) -> torch.Tensor:
    values = list(BLOCK)
    for index, value in changed.items():
        values[int(index[1:])] = value
    return torch.tensor([values])


def test_what_crosses_a_boundary_arrives_as_a_whole_step():
    earlier, before = block(i1=1.3, i2=1.2), block(i1=1.2, i2=1.2)
    now = block(i1=1.26, i2=1.21)  # the boundary is at 1.25: i1 goes back to 1.5, i2 stays at 1
    row = update_row(earlier, before, now)
    assert (row["n"], row["n_flipped"], row["n_code_flipped"], row["n_returned"]) == (32, 1, 1, 1)
    assert row["sum_dw2"] == pytest.approx(0.06**2 + 0.01**2, rel=1e-4)
    assert row["sum_dq2"] == row["sum_abs_dq"] ** 2 == 0.25
    assert row["sum_dw_dq"] == pytest.approx(0.06 * 0.5, rel=1e-4)
    assert row["n_near"] == 2  # .05 from the boundary is a tenth of the step, 1.2000000477 just within
    assert update_row(None, before, now)["n_returnable"] == 0


def test_a_scale_that_doubles_moves_values_whose_code_stays():
    before, now = block(), block(i0=6.5)
    row = update_row(None, before, now)
    q = [mxprobe_kernels.quantize_dequantize(w)[0] for w in (before, now)]
    assert row["n_flipped"] == int((q[0] != q[1]).sum()) == 0  # 6.5 -> 6 at s = 2, and ones are ones at half the code
    assert row["n_code_flipped"] == 32


def test_values_not_finite_and_beyond_a_block_count_as_unchanged():
    before, now = block(), block(i3=float("nan"))
    row = update_row(before, before, now)
    assert row["n_flipped"] == row["n_code_flipped"] == 0
    assert np.isfinite([value for name, value in row.items() if name.startswith("sum")]).all()


def test_evenly_spread_elements_are_near_a_boundary_one_time_in_five():
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(400, 32, generator=generator) * 12.0 - 6.0
    w[:, 0] = 6.0
    near = near_boundary(mxprobe_kernels.error_fields(w))
    assert float(near[:, 1:].float().mean()) == pytest.approx(0.2, abs=0.01)


def test_ratios_add_first_and_divide_last():
    rows = pd.DataFrame([{"module": m, "step": s, **update_row(None, block(), block(i1=v))} for m, s, v in
                         (("a", 1, 1.26), ("a", 2, 1.1), ("b", 1, 1.0))])  # fmt: skip
    found = update_ratios(rows).set_index("module")
    assert found.loc["a", "flip_frac"] == pytest.approx(1 / 64)
    assert found.loc["a", "norm_ratio"] == pytest.approx(np.sqrt(0.25 / (0.26**2 + 0.1**2)), rel=1e-4)
    assert found.loc["a", "cosine"] == pytest.approx(0.26 * 0.5 / np.sqrt(0.25 * (0.26**2 + 0.1**2)), rel=1e-4)
    assert np.isnan(found.loc["a", "return_frac"])
    assert np.isnan(found.loc["b", "norm_ratio"])
    seen = update_visibility(rows)
    assert seen is not None
    assert (seen.n_modules, seen.n_steps) == (2, 2)
    assert "cosine" in update_words(seen)
    assert update_visibility(rows.iloc[:0]) is None


def test_oscillation_against_its_definition_in_float64():
    """Code flips, returns, R_w and the distance to the boundary, element by element."""
    generator = torch.Generator().manual_seed(1)
    earlier = torch.randn(24, 96, generator=generator)
    before, now = (earlier + 0.05 * torch.randn(24, 96, generator=generator) for _ in range(2))
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)

    def rounded(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q(w), codes, and |w| / scale, float64 [24, 3, 32]; no element lies on a tie."""
        blocks = w.double().reshape(24, 3, 32)
        scale = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6.0))
        z = blocks.abs() / scale
        code = (z[..., None] - grid).abs().argmin(-1)
        return torch.sign(blocks) * grid[code] * scale, torch.sign(blocks) * code, z

    (q0, _, _), (q1, code1, z1), (q2, code2, _) = map(rounded, (earlier, before, now))
    boundary = ((grid[1:] + grid[:-1]) / 2, 0.1 * (grid[1:] - grid[:-1]))
    near = ((z1[..., None] - boundary[0]).abs() < boundary[1]).any(-1)
    flipped = q2 != q1
    found = update_ratios(pd.DataFrame([{"module": "a", **update_row(earlier, before, now)}])).iloc[0]
    assert found["flip_frac"] == pytest.approx(float(flipped.double().mean()))
    assert found["code_flip_frac"] == pytest.approx(float((code2 != code1).double().mean()))
    assert found["return_frac"] == pytest.approx(float((q2 == q0)[flipped].double().mean()))
    assert found["near_frac"] == pytest.approx(float(near.double().mean()))
    assert found["r_w"] == pytest.approx(float((q2 - q1).abs().sum() / (now.double() - before.double()).abs().sum()))


def test_a_row_per_module_is_written_once_in_a_group_of_versions():
    tables: dict[str, list[dict[str, Any]]] = {}
    context = part_context.told().context
    modules = {"a": nn.Linear(64, 8)}
    modules["b"] = modules["a"]
    probes = {name: SimpleNamespace(name=name, module=module) for name, module in modules.items()}
    versions = Versions(context, SimpleNamespace(probes=probes, linears=lambda: modules))  # type: ignore[arg-type]
    for step in (1, 2, 3, 4, 5, 9, 10, 11, 12):  # as around two probed steps
        with torch.no_grad():
            modules["a"].weight.add_(0.05 * torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
        context.clock.step, context.clock.keeps_versions = step, True
        versions.begin()
    add = lambda table, row: tables.setdefault(table, []).append(row)  # noqa: E731
    context.recorder.add = add  # type: ignore[method-assign]
    context.worker.start()
    assert context.worker.drain(60)
    context.worker.stop(60)
    assert set(tables) == {"updates", "weight_codes"}
    rows = tables["updates"]
    assert all(set(row) == {name for name, _ in TABLES["updates"]} for row in rows)
    assert [(row["module"], row["from_step"], row["step"]) for row in rows] == [
        ("a", 2, 3),
        ("b", 2, 3),
        ("a", 10, 11),
        ("b", 10, 11),
    ]
    assert all(row["n_flipped"] > 0 and row["n_returnable"] == row["n"] for row in rows)
