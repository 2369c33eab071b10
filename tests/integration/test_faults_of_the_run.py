"""What a run may do under the agent's hands: return anything from a Linear, rebuild its model, be interrupted, fork,
have its clocks set. It keeps its bits, and the agent goes on or leaves."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.agent.probes import module_probe as hooks
from tests.standin_controller import controlled, wait_for
from tests.watched_run import (
    Block,
    Model,
    Run,
    agent_beside,
    errors_told,
    fingerprint_alone,
    step_until_it_has_left,
    what_is_left,
)


class Odd(nn.Linear):
    """A Linear whose output is what `shape` makes of it; `restore` finds the [.., out] tensor in it again."""

    def __init__(self, shape: Callable[[torch.Tensor], Any], restore: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(32, 32)
        self.shape, self.restore = shape, restore

    def forward(self, input: torch.Tensor) -> Any:
        return self.shape(super().forward(input))


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


def _forget(_: Any) -> torch.Tensor:
    return torch.zeros(32)


ODD: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda y: (y, None), lambda out: out[0]),
    "dict": (lambda y: {"y": y}, lambda out: out["y"]),
    "none": (lambda y: None, _forget),
    "number": (lambda y: 3.5, _forget),
    "sparse": (lambda y: y.to_sparse(), lambda out: out.to_dense()),
    "complex": (lambda y: torch.complex(y, y), lambda out: out.real),
    "quantized": (lambda y: torch.quantize_per_tensor(y.detach(), 0.1, 0, torch.qint8), lambda out: out.dequantize()),
    "meta": (lambda y: y.detach().to("meta"), _forget),
    "subclass": (lambda y: y.as_subclass(Tagged), lambda out: out.as_subclass(torch.Tensor)),
    "integer": (lambda y: y.detach().round().long(), lambda out: out.float()),
    "scalar": (lambda y: y.sum(), lambda out: out.expand(32)),
    "empty": (lambda y: y[:0], _forget),
    "infinite": (lambda y: y.detach() * torch.inf, lambda out: torch.where(out.isfinite(), out, 0.0)),
    "float64": (lambda y: y.double(), lambda out: out.float()),
}


class OddModel(Model):
    """Every kind of Linear above in a row, one called by keyword, one without rows, and one on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ModuleDict({name: Odd(*how) for name, how in ODD.items()})
        self.by_keyword, self.without_rows, self.nowhere = (nn.Linear(32, 32) for _ in range(3))
        self.nowhere.to("meta").requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(tokens))
        for module in self.odd.values():
            x = x + 0.1 * module.restore(module(x))
        self.without_rows(x[:0])
        self.nowhere(x.to("meta"))
        return self.lm_head(self.norm(x + self.by_keyword(input=x)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # deprecated, and about for a while yet
def test_a_linear_may_return_anything(tmp_path: Path) -> None:
    watched = Run(OddModel)
    config = {"every": 2, "weights_every": 2, "whatifs": ("of:0.5",), "record": True, "sensitivity_every": 10}
    with controlled(tmp_path, **config, replay_every=6, replay_arms=("q", "high")) as controller:
        step_until_it_has_left(watched, controller)
    assert watched.fingerprint() == fingerprint_alone(len(watched.losses), lambda: Run(OddModel))
    assert what_is_left(watched.model) == {}
    assert controller.frame("detached")["reason"] == "asked"
    # A replay puts plain Linears in their place, and the model falls over what these return: it is not replayed again.
    assert [error.partition(":")[0] for error in errors_told(controller)] == ["replaying a call"]
    measured = {row["module"] for row in controller.rows["tensors"]}
    assert {"block.up", "lm_head"} <= measured
    why = {row["module"]: row["reason"].partition(";")[0] for row in controller.rows["modules"]}
    assert why["odd.tuple"] == "called, but not readable: input is a Tensor, output a tuple"
    assert why["odd.complex"] == "called, but not readable: input is float32 [4, 8, 32], output complex64 [4, 8, 32]"


class Rebuilt(Run):
    """Drops its model and optimizer after so many steps, and trains on with others."""

    AT = 8

    def step(self) -> None:
        if len(self.losses) == self.AT:
            self.old = [weakref.ref(p) for p in self.model.parameters()]
            del self.model, self.optimizer
            gc.collect()
            self.model = nn.Sequential(nn.Embedding(50, 32), Block(), nn.Linear(32, 50))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        super().step()


def test_a_model_that_is_rebuilt_is_let_go(tmp_path: Path) -> None:
    watched = Rebuilt()
    with controlled(tmp_path, every=2, record=True, whatifs=("of:0.5",)) as controller, agent_beside(controller) as it:
        while it.is_alive():
            watched.step()
            if len(watched.losses) < Rebuilt.AT:
                wait_for(lambda: controller.attached.is_set() or len(watched.losses) < 4, "not attached")
            time.sleep(0.002)
    assert watched.fingerprint() == fingerprint_alone(len(watched.losses), Rebuilt)
    assert controller.frame("detached")["reason"] == "model_gone"
    assert controller.frame("detached")["steps"] >= 1
    gc.collect()
    assert [ref for ref in watched.old if ref() is not None] == [], "the agent has kept the old model"
    assert what_is_left(watched.model) == {}


class TimeLimitError(Exception):
    """What a grader's alarm raises."""


@pytest.mark.parametrize("raised", [TimeLimitError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_in_a_hook_reaches_the_run(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives while our hook runs: nothing tells the run so, and it gets its exception all the same."""
    snapshot, to_come = hooks.ModuleProbe._snapshot, [signal.SIGUSR1]

    def interrupted(self: hooks.ModuleProbe, *args: Any) -> Any:
        if to_come:
            signal.raise_signal(to_come.pop())
        return snapshot(self, *args)

    def handler(number: int, frame: Any) -> None:
        raise raised("time is up")

    monkeypatch.setattr(hooks.ModuleProbe, "_snapshot", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    caught: list[BaseException] = []
    watched = Run()

    try:
        run_step = watched.step

        def step() -> None:
            try:
                run_step()
            except (TimeLimitError, KeyboardInterrupt) as error:
                caught.append(error)

        watched.step = step
        with controlled(tmp_path, every=2, whatifs=("of:0.5",)) as controller:
            step_until_it_has_left(watched, controller)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [(type(error), str(error)) for error in caught] == [(raised, "time is up")]
    assert controller.frame("detached")["reason"] == "asked"
    assert errors_told(controller) == []
    assert what_is_left(watched.model) == {}


def test_clocks_that_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between 1970 and 2100, at every look; the performance counter by an hour either way."""
    rng, counter = random.Random(0), time.perf_counter_ns
    wall_ns = [0, 4 * 10**18]
    monkeypatch.setattr(time, "time_ns", lambda: rng.randrange(*wall_ns))
    monkeypatch.setattr(time, "time", lambda: rng.randrange(*wall_ns) / 1e9)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: counter() + rng.randrange(-3600, 3600) * 10**9)
    watched = Run()
    with controlled(tmp_path, every=2, record=True, whatifs=("of:0.5",), max_overhead=0.5) as controller:
        step_until_it_has_left(watched, controller)
    assert watched.fingerprint() == fingerprint_alone(len(watched.losses))
    assert what_is_left(watched.model) == {}
    assert (controller.frame("detached")["reason"], errors_told(controller)) == ("asked", [])
    assert len(controller.rows["overhead"]) >= 10


class Waits(torch.autograd.Function):
    """Passes its input on; in the backward pass, calls `during` first."""

    during: Callable[[], None] = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Waits.during()
        return gradient


class WithPause(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(Waits.apply(self.block(self.embed(tokens)))))


@pytest.mark.parametrize("how", ["controller killed", pytest.param("detach asked", marks=pytest.mark.slow)])
def test_detached_in_the_middle_of_a_backward_pass(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head has been taken, those below it will never be: the hooks go out meanwhile."""
    watched = Run(WithPause)
    with controlled(tmp_path, every=2, record=True, whatifs=("of:0.5",)) as controller, agent_beside(controller) as it:
        while not controller.attached.is_set() or len(watched.losses) < 8:
            watched.step()
            time.sleep(0.002)
        hooked = [m for m in watched.model.modules() if m._forward_pre_hooks]
        assert hooked

        def let_it_leave() -> None:
            if how == "controller killed":
                controller.die()
            else:
                controller.send({"verb": "detach"})
            wait_for(lambda: not any(m._forward_pre_hooks for m in hooked), "the hooks stay")

        monkeypatch.setattr(Waits, "during", staticmethod(let_it_leave))
        watched.step()
        monkeypatch.setattr(Waits, "during", staticmethod(lambda: None))
        while it.is_alive():
            watched.step()
    assert watched.fingerprint() == fingerprint_alone(len(watched.losses), lambda: Run(WithPause))
    assert what_is_left(watched.model) == {}


# Trains, forks in the middle, and trains on, in both processes; prints the losses of both, and how long the child's
# interpreter took to end.
FORKING = """
import atexit, json, os, sys, threading, time
socket_path = sys.argv[1]
import torch
from tests.watched_run import Run
torch.set_num_threads(1)
run = Run()
ended = []
atexit.register(lambda: os.write(writing, json.dumps([run.losses, time.monotonic() - ended[0]]).encode()))
reading, writing = os.pipe()
agent = None
if socket_path:
    from mxprobe.agent import boot
    agent = threading.Thread(target=boot.start, args=(socket_path, "token"), name="mxprobe-agent", daemon=True)
    agent.start()
    from torch.optim import optimizer as optim
    while not optim._global_optimizer_post_hooks:
        time.sleep(0.01)
# A process whose backward has run in other threads cannot run one after a fork; on a CPU it runs in the caller's.
for _ in range(12):
    run.step()
    time.sleep(0.05 if agent else 0)
child = os.fork()
for _ in range(12):
    run.step()
if not child:
    ended.append(time.monotonic())
    sys.exit(0)
os.close(writing)
of_child = json.loads(os.fdopen(reading).read())
os.waitpid(child, 0)
open(sys.argv[2], "w").close()
if agent:
    agent.join(60)
atexit.unregister(0)
print(json.dumps({"parent": run.losses, "child": of_child[0], "exit_s": of_child[1]}))
sys.stdout.flush()
os._exit(0)
"""


def forking(socket_path: str, mark: Path) -> dict[str, Any]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FORKING, socket_path, str(mark)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_fork_after_attach(tmp_path: Path) -> None:
    """The child trains on without us, and its end waits for nobody; the parent stays attached."""
    mark = tmp_path / "over"
    with controlled(tmp_path, every=2, record=True, whatifs=("of:0.5",)) as controller:

        def leave_at_the_end() -> None:
            wait_for(mark.exists, "the run does not end", 240)
            controller.send({"verb": "detach"})

        asking = threading.Thread(target=leave_at_the_end)
        asking.start()
        attached = forking(str(controller.path), mark)
        asking.join()
    alone = forking("", mark)
    assert controller.frame("detached")["reason"] == "asked"
    assert errors_told(controller) == []
    assert (attached["parent"], attached["child"]) == (alone["parent"], alone["child"])
    assert attached["parent"] == attached["child"], "both sides of a fork draw the same numbers"
    assert attached["exit_s"] < 6, "the child's end has waited for an agent that it has not"
