"""The agent in processes of its own: roles, refusals, a lost controller, the end of the job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.standin_controller import StandinController, controlled, wait_for

# Starts the agent as the payload does, runs in one of several ways until told to stop, and says what is left.
JOB = """
import json, os, sys, threading, time
mode, socket_path, stop = sys.argv[1:]
from mxprobe.agent import boot
agent = threading.Thread(target=boot.start, args=(socket_path, "token"), name="mxprobe-agent", daemon=True)
if mode == "no_torch":
    assert "torch" not in sys.modules
    agent.start()
    agent.join()
    assert "torch" not in sys.modules
    sys.exit(0)
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    loss = model(torch.randn(4, 8, 32)).pow(2).mean()
    loss.backward()
    if mode != "no_step":
        optimizer.step()
    optimizer.zero_grad()
def serve():
    with torch.inference_mode():
        model(torch.randn(4, 8, 32))
        for _ in range(3):
            model(torch.randn(4, 1, 32))
agent.start()
n = 0
while not os.path.exists(stop):
    if mode == "serves":
        serve()
    elif mode == "stalls" and os.path.exists(stop + ".stall"):
        time.sleep(0.01)
    elif mode != "idle":
        step()
    n += 1
    time.sleep(0.005)
    if mode == "ends" and n == 60:
        sys.exit(7)
agent.join(20)
print(json.dumps({
    "steps": n,
    "agent": agent.is_alive(),
    "threads": [t.name for t in threading.enumerate() if t.name.startswith("mxprobe")],
    "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        + len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks)
        + len(optim._global_optimizer_post_hooks),
}))
"""
CLEAN = {"agent": False, "threads": [], "hooks": 0}


class Job:
    def __init__(self, process: subprocess.Popen[str], stop: Path) -> None:
        self.process = process
        self._stop = stop

    def stall(self) -> None:
        self._stop.with_name(self._stop.name + ".stall").touch()

    def finish(self) -> dict[str, Any]:
        """Let it end, and return what it printed."""
        self._stop.touch()
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        assert err == ""
        return json.loads(out)


@contextmanager
def job(mode: str, controller: StandinController, directory: Path) -> Generator[Job]:
    stop = directory / "stop"
    command = [sys.executable, "-c", JOB, mode, str(controller.path), str(stop)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Job(process, stop)
    finally:
        process.kill()
        process.communicate()


def test_a_job_that_ends_while_attached_keeps_its_exit_code_and_says_goodbye(tmp_path: Path):
    with controlled(tmp_path, every=2) as controller, job("ends", controller, tmp_path) as target:
        assert controller.frame("attached")["modules"] == 2
        goodbye = controller.frame("detached")
        assert target.process.wait(20) == 7
        assert target.process.communicate()[1] == ""
    assert goodbye["reason"] == "exit"
    assert goodbye["unacknowledged"] == 0
    kinds = [row["kind"] for row in controller.rows["events"]]
    assert [kind for kind in kinds if kind in ("attached", "error", "detached")] == ["attached", "detached"]


def test_a_killed_controller_ends_the_attach_and_not_the_training(tmp_path: Path):
    with controlled(tmp_path, every=2) as controller, job("trains", controller, tmp_path) as target:
        controller.frame("attached")
        wait_for(lambda: len(controller.rows.get("overhead", [])) > 3, "nothing recorded")
        controller.die()
        time.sleep(1)
        report = target.finish()
    assert report.pop("steps") > 10
    assert report == CLEAN


def test_without_a_sign_of_life_the_lease_runs_out(tmp_path: Path):
    options = {"every": 50, "lease_s": 1.0, "ping": False, "acknowledge": False}
    with controlled(tmp_path, **options) as controller, job("trains", controller, tmp_path) as target:
        assert controller.frame("detached")["reason"] == "lease_expired"
        report = target.finish()
    report.pop("steps")
    assert report == CLEAN


def test_a_process_that_only_generates_is_a_rollout_worker(tmp_path: Path):
    with controlled(tmp_path, every=3, step_timeout_s=1.0) as controller, job("serves", controller, tmp_path) as target:
        attached = controller.frame("attached")
        wait_for(lambda: len(controller.rows.get("tensors", [])) > 10, "nothing measured")
        controller.send({"verb": "detach"})
        controller.frame("detached")
        report = target.finish()
    report.pop("steps")
    assert report == CLEAN
    assert (attached["role"], attached["roots"], attached["modules"]) == ("rollout", ["Sequential"], 2)
    assert {row["phase"] for table in ("tensors", "outputs") for row in controller.rows[table]} == {"rollout"}
    assert {row["role"] for row in controller.rows["tensors"]} == {"x_fwd", "w_fwd"}
    last = {row["module"]: row for row in controller.rows["modules"]}
    assert last["0"]["status"] == "probed"
    assert last["0"]["rollout_rows"] in (4, 32)


@pytest.mark.parametrize(
    ("mode", "reason", "detail"),
    [
        ("no_step", "no_step", "1 entered with gradient (Sequential)"),
        ("idle", "no_step", "no forward pass of any module"),
        ("no_torch", "no_torch", "torch is not among the imported modules"),
    ],
)
def test_what_cannot_be_served_is_told_and_left_alone(tmp_path: Path, mode: str, reason: str, detail: str):
    with controlled(tmp_path, step_timeout_s=1.0) as controller, job(mode, controller, tmp_path) as target:
        failed = controller.frame("failed")
        assert (failed["reason"], failed["detail"]) == (reason, detail)
        wait_for(controller.closed.is_set, "the agent keeps the connection")
        if mode == "no_torch":
            assert target.process.wait(20) == 0
        else:
            report = target.finish()
            report.pop("steps")
            assert report == CLEAN
    assert controller.rows == {}


def test_a_training_that_stalls_is_detached_all_the_same(tmp_path: Path):
    with controlled(tmp_path, every=2) as controller, job("stalls", controller, tmp_path) as target:
        controller.frame("attached")
        target.stall()
        time.sleep(0.2)
        asked = time.monotonic()
        controller.send({"verb": "detach"})
        goodbye = controller.frame("detached")
        assert time.monotonic() - asked < 15
        report = target.finish()
    assert goodbye["reason"] == "asked"
    report.pop("steps")
    assert report == CLEAN


def test_status_tells_where_it_stands(tmp_path: Path):
    with controlled(tmp_path, every=2) as controller, job("trains", controller, tmp_path) as target:
        controller.frame("attached")
        controller.send({"verb": "status"})
        status = controller.frame("status")
        controller.send({"verb": "detach"})
        controller.frame("detached")
        target.finish()
    assert (status["state"], status["role"], status["modules"]) == ("attached", "trainer", 2)
    assert status["n_errors"] == 0
