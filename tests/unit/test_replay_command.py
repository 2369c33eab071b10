"""`mxprobe replay` on the sums of real replays: one screen, JSON, and an answer in words where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mxprobe.cli import main
from mxprobe.errors import EXIT_TRACE
from mxprobe.measuring.replay.arms import DEFAULT_ARMS, replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.gradient_probes import probe_gradients
from mxprobe.measuring.replay.sensitivity import measure_sensitivity
from mxprobe.trace import TraceWriter
from tests import small_lm
from tests.synthetic import columns_of
from tests.unit.test_replay_gradients import HELD_OUT, loss_gradient

HOW = {"time_ns": 0, "format": "mxfp4", "rule": "rceil"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replayed microbatches of an untrained model, as the agent writes them; what-ifs of one module."""
    directory = tmp_path_factory.mktemp("trace") / "run.mxprobe"
    model = small_lm.SmallLM(n_layers=1)
    modules = small_lm.linears(model)
    with TraceWriter(directory, {"config": {"rule": "rceil"}}) as writer:
        for step in (3, 5):
            ids = small_lm.batch(6, HELD_OUT + step)
            gradient, _ = loss_gradient(model, ids)
            call = capture(model, (ids,), {})
            when: dict[str, Any] = {"step": step, "micro_step": 0, **HOW}
            arms = list(replay_arms(call, modules, (*DEFAULT_ARMS, "of:0.5"), gradient=gradient, seed=step))
            tables = {
                "replays": [{**when, "n_modules": len(modules), **arm.row()} for arm in arms],
                "replay_gradients": [{**when, **row} for arm in arms for row in arm.gradient_rows()],
                "gradient_probes": [{**when, **row} for row in probe_gradients(call, modules, gradient, n_probes=2)],
                "sensitivity": [{**when, **row} for row in measure_sensitivity(call, modules, seed=step).rows()],
            }
            for table, rows in tables.items():
                writer.append(table, columns_of(rows))
        for role in ("x_fwd", "w_fwd"):
            place = {"step": [3], "module": ["layers.0.up"], "role": [role], "phase": ["train"]}
            writer.append("tensors", {**place, "out_ref2": [9.0], "out_e2": [1.0]})
            for name, left in (("of:0.5", 0.25), ("mxfp8", 0.04)):
                writer.append("whatif", {**place, "correction": [name], "out_ref2": [9.0], "out_e2": [left]})
        event = {"step": [3], "time_ns": [0], "kind": ["sensitivity"], "detail": ["replays: the first took 9 ms"]}
        writer.append("events", event)
    return directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)], env={"COLUMNS": "100"})


def test_one_screen_says_arms_split_controls_and_gradients(trace: Path):
    done = run(trace)
    assert done.exit_code == 0, done.output
    assert "2 microbatches replayed (steps 3, 5)" in done.stdout
    for words in (
        "qstar_dz",
        "sums to 1",
        "Delta2 predicts",
        "projection gain",
        "by double backward",
        "first took 9 ms",
    ):
        assert words in done.stdout, words
    assert "more: --all" in done.stdout
    assert len(run(trace, "--all").stdout) > len(done.stdout)


def test_json_holds_every_number(trace: Path):
    data = json.loads(run(trace, "--json").stdout)
    assert data["schema"] == "mxprobe.replay/1"
    assert data["steps"] == [3, 5]
    arms = {arm["arm"]: arm for arm in data["arms"]}
    assert arms.keys() == {*DEFAULT_ARMS, "of:0.5"}
    assert arms["q"]["gain"] is None
    assert arms["of:0.5"]["predicted_gain"] == pytest.approx(0.75)
    assert arms["of:0.5"]["gain"]["value"] == pytest.approx(0.75, abs=0.2)
    assert arms["mxfp8"]["gradient_error"]["value"] < 0.2 * arms["q"]["gradient_error"]["value"]
    for split in (data["kl_split"], data["gradient_split"]):
        assert sum(part["value"] for part in split.values()) == pytest.approx(1.0)
    assert data["predicted_kl"] > 0
    assert {row["module"] for row in data["gradients"]} == set(small_lm.linears(small_lm.SmallLM(n_layers=1)))
    assert len(data["operands"]) == 7 * 6
    documented = (Path(__file__).parents[2] / "docs" / "commands" / "replay.md").read_text()
    for name in (*data, *data["arms"][0]):
        assert f"`{name}`" in documented, name


def test_without_replays_it_says_how_to_get_them(tmp_path: Path):
    with TraceWriter(tmp_path / "t", {}) as writer:
        event = {"step": [1], "time_ns": [0], "kind": ["sensitivity"], "detail": ["no replay: FSDP gathers parameters"]}
        writer.append("events", event)
    done = run(tmp_path / "t")
    assert done.exit_code == EXIT_TRACE
    assert "holds no replays" in done.stderr
    assert "FSDP gathers parameters" in done.stderr
    assert "--replay-every" in done.stderr
    assert run(tmp_path / "nowhere").exit_code == EXIT_TRACE
