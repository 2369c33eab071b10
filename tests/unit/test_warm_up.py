"""Nothing is probed while kernels are compiled, and the warm-up calls whatever measuring calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from mxprobe.agent.guard import Guard
from mxprobe.agent.parts import warm_up
from mxprobe.agent.parts.warm_up import WarmUp
from mxprobe.agent.worker import Worker
from mxprobe.protocol import AgentConfig
from tests.standin_controller import agent_thread, controlled, wait_for


class Rows:
    """Takes a worker's rows."""

    def flush(self) -> None:
        pass


def waits(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_the_worker_is_busy_until_all_was_measured_once():
    told: list[tuple[str, str]] = []
    config = AgentConfig(whatifs=("of:0.5", "nvfp4"))
    worker = Worker(Rows(), Guard(1, lambda *_: None, lambda: None))  # type: ignore[arg-type]
    worker.start()
    warming = WarmUp(worker, config, lambda event: told.append((event.kind, event.words)))
    gate = threading.Event()
    worker.put(lambda: waits(gate))
    warming.compile_for(torch.device("cpu"), torch.bfloat16)
    assert warming.is_busy
    gate.set()
    assert worker.drain(60)
    worker.stop(60)
    assert not warming.is_busy
    assert [kind for kind, _ in told] == ["kernels"]


def test_no_step_is_probed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    monkeypatch.setattr(warm_up, "measure_zeros", lambda *_: waits(gate))

    def watch(self: WarmUp, roots: Sequence[nn.Module]) -> None:
        self.compile_for(torch.device("cpu"), torch.float32)  # as on a GPU

    monkeypatch.setattr(WarmUp, "watch", watch)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> bool:
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return False

    with controlled(tmp_path, every=1, whatifs=(), sensitivity_every=0) as controller, agent_thread(controller):
        wait_for(lambda: step() or list(controller.frames), "no agent")
        for _ in range(30):
            step()
        assert not controller.rows.get("tensors")
        gate.set()
        wait_for(lambda: step() or controller.rows.get("tensors"), "nothing measured after the warm-up")
        controller.send({"verb": "detach"})
        wait_for(lambda: step() or controller.closed.is_set(), "not detached")
    assert any(row["kind"] == "kernels" for row in controller.rows["events"])
