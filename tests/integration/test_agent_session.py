"""What the session takes for the model, for a step, and for the end of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizer_hooks

from mxprobe.agent import boot
from tests.standin_controller import StandinController, agent_thread, controlled, wait_for


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.randn(4, 8, 32)).pow(2).mean()


def watching() -> bool:
    return bool(optimizer_hooks._global_optimizer_post_hooks)


def attend(controller: StandinController, step: Callable[[], Any], n: int = 30) -> list[dict[str, Any]]:
    """Run `step` with the agent on, detach, and return the overhead rows: one for each step it counted."""
    with agent_thread(controller):
        wait_for(watching, "the agent does not watch")
        for _ in range(n):
            step()
            time.sleep(0.01)
        controller.send({"verb": "detach"})
        deadline = time.monotonic() + 20
        while not controller.closed.is_set() and time.monotonic() < deadline:
            step()
            time.sleep(0.01)
    return controller.rows["overhead"]


def train(net: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    loss_of(net).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_an_attach_that_lands_inside_a_forward_still_finds_the_whole_model(tmp_path: Path):
    class Landing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not started:
                started.append(threading.Thread(target=boot.start, args=(str(controller.path), "token"), daemon=True))
                started[0].start()
                wait_for(watching, "the agent does not watch")
            return x

    started: list[threading.Thread] = []
    net = nn.Sequential(nn.Linear(32, 32), Landing(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(net.parameters())
    with controlled(tmp_path, every=50) as controller:
        for _ in range(4):
            train(net, [optimizer])
        attached = controller.frame("attached")
        controller.send({"verb": "detach"})
        time.sleep(0.3)
        train(net, [optimizer])
        started[0].join(20)
    assert (attached["roots"], attached["modules"]) == (["Sequential"], 2)
    assert attached["step"] == 2  # the step it landed in was not trusted


def test_the_step_number_is_the_run_s_own(tmp_path: Path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(7):
        train(net, [optimizer])
    resumed = torch.optim.AdamW(net.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    with controlled(tmp_path, every=50) as controller:
        steps = [row["step"] for row in attend(controller, lambda: train(net, [resumed]))]
    assert steps == list(range(9, 9 + len(steps)))


def test_two_optimizers_of_one_model_make_one_step(tmp_path: Path):
    net = model()
    optimizers = [torch.optim.AdamW(net[0].parameters()), torch.optim.SGD(net[2].parameters(), lr=1e-3)]
    with controlled(tmp_path, every=50) as controller:
        rows = attend(controller, lambda: train(net, optimizers))
    assert 28 <= len(rows) < 45


def test_a_replaced_optimizer_takes_over_the_count(tmp_path: Path):
    net = model()
    current = [torch.optim.AdamW(net.parameters())]
    n = 0

    def step() -> None:
        nonlocal n
        n += 1
        if n == 10:
            current[0] = torch.optim.AdamW(net.parameters())
        train(net, current)

    with controlled(tmp_path, every=50) as controller:
        rows = attend(controller, step)
    assert len(rows) >= 25


def test_lbfgs_with_its_closure_is_one_step_and_one_measurement(tmp_path: Path):
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    with controlled(tmp_path, every=4, whatifs=()) as controller:
        rows = attend(controller, lambda: optimizer.step(closure), 15)
    assert 13 <= len(rows) < 30
    keys = [(row["step"], row["module"], row["role"]) for row in controller.rows["tensors"]]
    assert len(keys) == len(set(keys)) > 0


def test_another_model_in_the_process_is_not_taken_for_the_policy(tmp_path: Path):
    net, reference, critic = model(), model(), nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        with torch.no_grad():
            loss_of(reference)
        loss_of(critic)
        train(net, [optimizer])

    with controlled(tmp_path, every=50) as controller:
        attend(controller, step, 5)
    assert controller.frame("attached")["modules"] == 2
    assert {row["module"] for row in controller.rows["modules"]} == {"0", "2"}


def test_a_generation_that_falls_between_probed_steps_is_caught(tmp_path: Path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    n = 0

    def step() -> None:
        nonlocal n
        n += 1
        if n % 4 == 0:
            with torch.no_grad():
                for width in (6, 1, 1):
                    net(torch.randn(4, width, 32))
        train(net, [optimizer])

    with controlled(tmp_path, every=5, whatifs=()) as controller:
        attend(controller, step, 120)
    phases: dict[int, set[str]] = {}
    for row in controller.rows["outputs"]:
        phases.setdefault(row["step"], set()).add(row["phase"])
    generated = {step for step, seen in phases.items() if "rollout" in seen}
    assert len(generated) >= 3
    assert all(phases[step] == {"train", "rollout"} for step in generated)
    assert {row["phase"] for row in controller.rows["tensors"]} == {"train"}


def test_layer_patterns_select(tmp_path: Path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with controlled(tmp_path, every=3, layers=("2",), whatifs=()) as controller:
        attend(controller, lambda: train(net, [optimizer]), 15)
    assert {row["module"] for row in controller.rows["tensors"]} == {"2"}
    assert {row["module"]: row["status"] for row in controller.rows["modules"]} == {"0": "not_selected", "2": "probed"}


def test_overhead_adds_up(tmp_path: Path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with controlled(tmp_path, every=4) as controller:
        rows = attend(controller, lambda: train(net, [optimizer]))
    assert all(0 < row["probe_ns"] < row["step_ns"] for row in rows[1:])
    assert {row["measure_ns"] > 0 for row in rows if row["probed"]} == {True}
    assert rows[-1]["n_errors"] == rows[-1]["n_dropped"] == 0
    assert rows[-1]["sent_bytes"] > 0


def test_a_module_whose_gradient_does_not_come_is_named(tmp_path: Path):
    class Part(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, torch.cat((self.weight, self.weight)))[..., : self.out_features]

    net = nn.Sequential(nn.Linear(32, 32), Part(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with controlled(tmp_path, every=2, weights_every=2, whatifs=()) as controller:
        attend(controller, lambda: train(net, [optimizer]))
    notes = [row["detail"] for row in controller.rows["events"] if row["kind"] == "coverage"]
    assert len(notes) == 1
    assert notes[0].startswith("1: no gradient came to its output")
    last = {row["module"]: row for row in controller.rows["modules"]}
    assert {name: row["status"] for name, row in last.items()} == {"0": "probed", "1": "probed", "3": "probed"}
    assert [name for name, row in last.items() if row["reason"]] == ["1"]
    assert {row["module"] for row in controller.rows["tensors"] if row["role"] == "g_dgrad"} == {"0", "3"}


def test_a_probe_that_costs_too_much_is_put_off_and_said_so(tmp_path: Path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with controlled(tmp_path, every=2, weights_every=2, whatifs=(), max_overhead=1e-5) as controller:
        attend(controller, lambda: train(net, [optimizer]))
    detached = controller.frame("detached")
    assert detached["probed_steps"] == 1
    assert detached["steps_put_off"] > 20
    assert (detached["max_overhead"], detached["every"], detached["module_share"]) == (1e-5, 2, 1.0)


def test_between_probed_steps_no_module_has_a_hook(tmp_path: Path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    hooked: list[int] = []

    def step() -> None:
        hooked.append(sum(bool(m._forward_hooks) for m in net.modules() if isinstance(m, nn.Linear)))
        train(net, [optimizer])

    with controlled(tmp_path, every=4, weights_every=4, whatifs=()) as controller:
        attend(controller, step)
    n_probed = controller.frame("detached")["probed_steps"]
    assert sum(n == 2 for n in hooked) >= n_probed > 1
    assert set(hooked) == {0, 2}
    assert sum(n == 0 for n in hooked) >= len(hooked) // 3
