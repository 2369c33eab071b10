"""The columns of neighbouring papers in a trace: which are there, what they are worth, and why one is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import mxprobe_kernels
from mxprobe.attribution.catalogue import DEFINITIONS, NO_REPLAY, OLDER, catalogue
from mxprobe.attribution.neighbours import relative_drift
from mxprobe.attribution.recommendation import PaperColumn
from mxprobe.cli import main
from mxprobe.measuring.operands.block_statistics import block_row, transposition_row
from mxprobe.measuring.operands.operand import Operand, measure_operand
from mxprobe.measuring.replay.arms import replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.measuring.tokens.mismatch import Pairs, rollout_rows
from mxprobe.measuring.versions.weight_updates import update_row
from mxprobe.schema import Role
from mxprobe.trace import TraceWriter, open_trace
from tests import small_lm, synthetic
from tests.synthetic import columns_of

HOW = {"time_ns": 0, "format": "mxfp4", "rule": "rceil"}
DOCS = Path(__file__).parents[2] / "docs"


class WithLoss(small_lm.SmallLM):
    """Returns a loss of its own beside the logits."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids)
        return {"logits": logits, "loss": logits.float().square().mean()}


def pairs(step: int) -> Pairs:
    log_p = -torch.rand(40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return Pairs(log_p, log_p - 0.01 * (1 + step), 4)


def measured(name: str, step: int, w: torch.Tensor) -> dict[str, list[dict[str, Any]]]:
    """Rows of `tensors` and `blocks` of one module, X [64, K] drawn."""
    x = torch.randn(64, w.shape[1], generator=torch.Generator().manual_seed(step))
    place = {"step": step, "micro_step": 0, "module": name, "phase": "train", "placement": "", **HOW}
    rows: dict[str, list[dict[str, Any]]] = {"tensors": [], "blocks": []}
    fields = {}
    for role, a, b in ((Role.X_FWD, x, w.T), (Role.W_FWD, w, x.T), (Role.W_DGRAD, w.T, x.new_ones(len(w), 1))):
        found = measure_operand(Operand(role, a[None], b[None], 1.0, len(a)), format="mxfp4", rule="rceil")
        fields[role] = found.fields
        of_tile = transposition_row(fields[Role.W_FWD], found.fields, None, None) if role is Role.W_DGRAD else {}
        sampled = {"sampled_frac": 1.0, "n_clusters": len(a), "role": role.value}
        rows["tensors"].append({**place, **found.row, **sampled, "n_edge_blocks": 0})
        rows["blocks"].append({**place, **sampled, **block_row(found.fields), **of_tile})
    return rows


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trace") / "run.mxprobe"
    torch.manual_seed(0)
    model = WithLoss(n_layers=1)
    modules, ids = small_lm.linears(model), small_lm.batch(4, 9)
    with torch.no_grad():
        logits = model(ids)["logits"]
    gradient = PolicyGradient(torch.randn_like(logits) / logits.numel(), None)
    when: dict[str, Any] = {"step": 3, "micro_step": 0, **HOW}
    with TraceWriter(directory, {"config": {"rule": "rceil"}}) as writer:
        arms = list(replay_arms(capture(model, (ids,), {}), modules, ("q", "q_weights"), gradient=gradient))
        tables: dict[str, list[dict[str, Any]]] = {
            "replays": [{**when, "n_modules": len(modules), **arm.row()} for arm in arms],
            "replay_gradients": [{**when, **row} for arm in arms for row in arm.gradient_rows()],
            "rollouts": [
                {"step": step, "time_ns": 0, "source": "generation", "temperature": 1.0, "dtype": "float32", **row}
                for step in range(8)
                for row in rollout_rows(pairs(step))
            ],
        }
        kept = {name: when[name] for name in ("step", "micro_step", "time_ns")}
        tables["layers"] = [{**kept, **row} for arm in arms if arm.representation for row in arm.representation.rows()]
        for name, module in modules.items():
            w = module.weight.detach()
            for table, rows in measured(name, 3, w).items():
                tables.setdefault(table, []).extend(rows)
            earlier = {"step": 3, "module": name, "from_step": 2, **HOW}
            tables.setdefault("updates", []).append({**earlier, **update_row(w * 0.98, w * 0.99, w)})
        tables["modules"] = [
            {"time_ns": 0, "module": name, "class_name": "Linear", "dtype": "float32", "shape": list(m.weight.shape)}
            | {"n_parameters": m.weight.numel(), "status": "probed", "reason": "", "train_rows": 64, "rollout_rows": 0}
            | {"gemm_flops": 1.0}
            for name, m in modules.items()
        ]
        for table, rows in tables.items():
            writer.append(table, columns_of(rows))
    return directory


def by_name(directory: Path) -> dict[str, PaperColumn]:
    columns = catalogue(open_trace(directory))
    assert [column.name for column in columns] == list(DEFINITIONS)
    for column in columns:
        assert (column.median is None) == bool(column.withheld), column
        assert column.definition
        assert column.source
    return {column.name: column for column in columns}


def test_every_column_has_its_value(trace: Path) -> None:
    found = by_name(trace)
    assert {name for name, column in found.items() if column.withheld} == set()
    model = WithLoss(n_layers=1)
    w = [module.weight for module in small_lm.linears(model).values()]
    assert found["transposition"].n == len(w) == found["snr_db"].n == found["basin_cosine"].n
    assert found["bucket_ratio"].n == 3 * len(w)
    assert 0.5 < found["bucket_ratio"].median < 1.0
    assert found["injected"].largest.startswith("layers.0.")


def test_the_models_own_loss_at_rounded_weights(trace: Path) -> None:
    torch.manual_seed(0)
    model, ids = WithLoss(n_layers=1), small_lm.batch(4, 9)
    with torch.no_grad():
        before = model(ids)["loss"].double()
        for module in small_lm.linears(model).values():
            module.weight.copy_(mxprobe_kernels.quantize_dequantize(module.weight)[0])
        expected = float(model(ids)["loss"].double() - before)
    assert by_name(trace)["basin_loss"].median == pytest.approx(expected, rel=1e-3)


def test_relative_drift_of_probability_differences(trace: Path) -> None:
    def difference(step: int) -> float:
        p = pairs(step)
        return float((p.log_prob_rollout.exp() - p.log_prob_train.exp()).abs().mean())

    x, y = np.mean([difference(0), difference(1)]), np.mean([difference(6), difference(7)])
    rollouts = open_trace(trace).rollouts()
    assert relative_drift(rollouts) == pytest.approx((x, y))
    assert by_name(trace)["relative_drift"].median == pytest.approx(y / x)
    assert all(np.isnan(relative_drift(rollouts[rollouts["step"] < 7])))


def test_what_is_missing_says_why(tmp_path: Path) -> None:
    synthetic.write_trace(tmp_path / "t", replace(synthetic.HEALTHY, steps=1, whatifs=()))
    found = by_name(tmp_path / "t")
    assert found["bucket_ratio"].median is not None
    assert found["snr_db"].withheld == found["basin_loss"].withheld == NO_REPLAY
    assert "8 steps" in found["relative_drift"].withheld
    assert found["transposition"].withheld == "no probed step held a weight and the gradient at its output"
    with TraceWriter(tmp_path / "empty", {"config": {}}):
        pass
    assert all(column.withheld not in ("", OLDER) for column in by_name(tmp_path / "empty").values())


def test_the_command_shows_them(trace: Path) -> None:
    run = CliRunner()
    text = " ".join(run.invoke(main, ["recommend", str(trace), "--explain"], env={"COLUMNS": "100"}).stdout.split())
    assert "What neighbouring papers measure" in text
    found = by_name(trace)["transposition"]
    assert f"transposition {found.median:.3g} [{found.low:.3g}, {found.high:.3g}]" in text
    data = json.loads(run.invoke(main, ["recommend", str(trace), "--json"]).stdout)["neighbours"]
    assert [each["name"] for each in data] == list(DEFINITIONS)
    documented = (DOCS / "recommend-json.md").read_text() + (DOCS / "sensitivity.md").read_text()
    for name in (*data[0], *DEFINITIONS):
        stem, _, k = name.rpartition("_")
        assert f"`{name}`" in documented or (k in ("5", "10") and f"`{stem}_1`" in documented), name
