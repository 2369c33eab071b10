"""A compiled model whose probed steps run eagerly: its modules are seen, and nothing is compiled anew for it."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.parts.eager import EVENT, NOT_BIT_EXACT, EagerSteps
from tests.standin_controller import agent_thread, controlled, wait_for

EVERY = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Compiled:
    """A model and how often it was compiled."""

    def __init__(self, *, in_place: bool) -> None:
        torch.manual_seed(0)
        torch.compiler.reset()
        self.n_compiled = 0
        net = Net()
        if in_place:
            net.compile(backend=self._backend)
        self.net: Any = net if in_place else torch.compile(net, backend=self._backend)
        self.optimizer = torch.optim.AdamW(net.parameters())

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.n_compiled += 1
        return graph.forward

    def step(self) -> None:
        self.net(torch.randn(4, 8, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("eager", "in_place"), [(False, False), (True, False), (True, True)])
def test_modules_of_a_compiled_model(tmp_path: Path, eager: bool, in_place: bool) -> None:
    model = Compiled(in_place=in_place)
    for _ in range(3):
        model.step()
    n_compiled, filters = model.n_compiled, list(warnings.filters)
    assert n_compiled > 0

    def measured() -> bool:
        probed = [row for row in controller.rows.get("overhead", []) if row["probed"]]
        return len(probed) >= 3

    with controlled(tmp_path, every=EVERY, weights_every=EVERY, eager_probe_steps=eager) as controller:
        with agent_thread(controller):

            def train_until(done: Any) -> None:
                stepped = threading.Event()

                def poll() -> bool:
                    model.step()
                    stepped.wait(0.005)
                    return bool(done())

                wait_for(poll, "the agent did not get so far")

            train_until(measured)
            controller.send({"verb": "status"})
            train_until(lambda: any(frame["verb"] == "status" for frame in controller.frames))
            controller.send({"verb": "detach"})
            train_until(controller.closed.is_set)
        status = controller.frame("status")
        events = [row["detail"] for row in controller.rows["events"] if row["kind"] == EVENT]
        rows = controller.rows.get("tensors", [])
    assert list(warnings.filters) == filters
    assert status["eager_probe_steps"] is eager
    assert model.n_compiled == n_compiled
    before = model.n_compiled
    model.step()
    assert model.n_compiled == before
    if eager:
        assert events == [NOT_BIT_EXACT]
        assert {(row["module"], row["role"]) for row in rows} >= {("up", "x_fwd"), ("down", "g_dgrad")}
        steps = {row["step"]: row["probed"] for row in controller.rows["overhead"]}
        assert {row["step"] for row in rows} <= {step for step, probed in steps.items() if probed}
        assert not all(steps.values())
    else:
        assert events == []
        # No hook is called there: the weights alone.
        assert {(row["module"], row["role"]) for row in rows} == {
            (module, role) for module in ("up", "down") for role in ("w_fwd", "w_dgrad")
        }
        reasons = {row["reason"] for row in controller.rows["modules"] if row["status"] != "probed"}
        assert any("runs inside torch.compile" in reason and "weights alone" in reason for reason in reasons)
    torch.compiler.reset()


def test_a_stance_of_the_users_comes_back() -> None:
    model, told = Compiled(in_place=False), list[str]()
    guard = Guard(3, lambda where, detail: told.append(detail), lambda: None)
    steps = EagerSteps(True, Clock(), guard, lambda event: told.append(event.words))
    steps.watch([model.net])
    with torch.compiler.set_stance("force_eager"):
        steps.enter()
        steps.remove()
        model.step()
        assert model.n_compiled == 0
    model.step()
    assert model.n_compiled > 0
    assert told == [NOT_BIT_EXACT]
    torch.compiler.reset()
