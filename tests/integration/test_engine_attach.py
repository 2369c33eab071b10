"""An engine under the agent: no optimizer, its steps are forward passes, and its weights are read after each load."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from tests.standin_controller import agent_thread, controlled, wait_for
from tests.standin_engine import EngineModel
from tests.unit.test_engines import LAYERS, PARTS, SIZE, weights


def test_a_process_without_an_optimizer_tells_what_it_holds_after_each_load(tmp_path: Path):
    model = EngineModel(LAYERS, SIZE, packed=True)
    model.load_weights(weights(1).items())
    before = EngineModel.load_weights
    with controlled(tmp_path, every=10_000, step_timeout_s=0.5) as controller, agent_thread(controller):

        def serve() -> bool:
            with torch.no_grad():
                model(torch.randn(4, SIZE))
            time.sleep(0.01)
            return False

        def n_held() -> int:
            return sum(row["form"] == "held" for row in list(controller.rows.get("weight_codes", [])))

        wait_for(lambda: serve() or controller.attached.is_set(), "not attached")
        wait_for(lambda: serve() or n_held() == LAYERS * len(PARTS), "no weights")
        assert EngineModel.load_weights is not before
        model.load_weights(weights(2).items())
        wait_for(lambda: serve() or n_held() == 2 * LAYERS * len(PARTS), "no weights after a load")
        controller.send({"verb": "detach"})
        wait_for(lambda: serve() or controller.closed.is_set(), "not detached")
    assert controller.frame("attached")["role"] == "rollout"
    assert EngineModel.load_weights is before
    assert not [row for row in controller.rows["events"] if row["kind"] == "error"]
    first, second = (
        [row["hashes"] for row in controller.rows["weight_codes"] if row["step"] == step]
        for step in sorted({row["step"] for row in controller.rows["weight_codes"]})
    )
    assert first != second
