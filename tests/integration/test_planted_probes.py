"""Operators planted in a compiled model: the operands that hooks show of the eager one, and nothing compiled anew."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxprobe as package
from mxprobe.agent.planted import EVENT, NOT_BIT_EXACT, NOTE, PLANTING
from mxprobe.errors import TraceError
from mxprobe.schema import COUNTS, ENERGY_SUMS, Role
from mxprobe.trace import open_trace
from tests.attach_targets import MXPROBE, mxprobe, until
from tests.standin_controller import agent_thread, controlled, wait_for

EVERY = 3
PLANTED_FILE = Path(package.__file__).parent / "attach" / "startup" / "planting.py"


_LOADED: list[ModuleType] = []
"""Operators cannot be defined twice in a process."""


def load_planting() -> ModuleType:
    """As the start-up hook does it."""
    spec = spec_from_file_location(PLANTING, PLANTED_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[PLANTING] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def planting(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    if not _LOADED:
        _LOADED.append(load_planting())
    monkeypatch.setitem(sys.modules, PLANTING, _LOADED[0])
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    torch.compiler.reset()
    _LOADED[0].plant()
    yield _LOADED[0]
    assert _LOADED[0].observer is None
    torch.compiler.reset()


class Net(nn.Module):
    """The output of `up` is changed in place; `twice` is called two times in a graph, or in its stead `again`."""

    def __init__(self, *, checkpointed: bool, by_two: bool) -> None:
        super().__init__()
        self.up, self.twice, self.down = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        if by_two:
            self.again = nn.Linear(64, 64)
            self.again.weight, self.again.bias = self.twice.weight, self.twice.bias
        self._checkpointed = checkpointed

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        second = getattr(self, "again", self.twice)
        return second(nn.functional.gelu(self.twice(self.up(x).mul_(2.0))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = checkpoint(self._middle, x, use_reentrant=False) if self._checkpointed else self._middle(x)
        return self.down(h)


Rows = dict[tuple[str, str], dict[str, Any]]


class Run:
    """A model whose weights never change and whose steps are all alike, attached for a few probed steps."""

    def __init__(self, directory: Path, *, checkpointed: bool = False, compiled: str = "") -> None:
        self.n_compiled = 0
        torch.manual_seed(0)
        self._x = torch.randn(4, 8, 32, requires_grad=checkpointed)
        net = Net(checkpointed=checkpointed, by_two=not compiled)
        self.net: Any = torch.compile(net, backend=self._backend, fullgraph=True) if compiled else net
        self._compiled = compiled
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
        for _ in range(2):
            self.step()
        self.n_compiled_before = self.n_compiled
        directory.mkdir()
        with controlled(directory, every=EVERY, weights_every=EVERY, sensitivity_every=0) as controller:
            with agent_thread(controller):
                self._train_until(lambda: sum(r["probed"] for r in controller.rows.get("overhead", [])) >= 2)
                controller.send({"verb": "status"})
                self._train_until(lambda: any(frame["verb"] == "status" for frame in controller.frames))
                controller.send({"verb": "detach"})
                self._train_until(controller.closed.is_set)
            self.status = controller.frame("status")
            self.events = {row["kind"]: row["detail"] for row in controller.rows["events"]}
            self.modules = {row["module"]: row for row in controller.rows["modules"]}
            self.rows: Rows = {(row["module"], row["role"]): row for row in controller.rows["tensors"]}
            rows = [(row["step"], row["module"], row["role"]) for row in controller.rows["tensors"]]
            assert len(rows) == len(set(rows))
            self.n_errors = controller.frame("detached")["n_errors"]
        self.step()

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.n_compiled += 1
        return torch._dynamo.lookup_backend(self._compiled)(graph, inputs)

    def step(self) -> None:
        self.net(self._x).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _train_until(self, done: Callable[[], bool]) -> None:
        stepped = threading.Event()

        def poll() -> bool:
            self.step()
            stepped.wait(0.002)
            return bool(done())

        wait_for(poll, "the agent did not get so far", timeout_s=300)


def same_sums(row: dict[str, Any], other: dict[str, Any], *, exact: bool) -> bool:
    counts = [row[name] for name in COUNTS] == [other[name] for name in COUNTS]
    return (counts or not exact) and all(
        row[name] == pytest.approx(other[name], rel=1e-6, abs=1e-6 * largest(name, other)) for name in ENERGY_SUMS
    )


def largest(name: str, row: dict[str, Any]) -> float:
    """What a sum could amount to: those with signs cancel to any degree."""
    return (row["n"] * row["sum_x2"]) ** 0.5 if name == "sum_e" else row["sum_x2"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # of inductor's import
@pytest.mark.parametrize(
    ("backend", "checkpointed"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_shows_the_operands_that_hooks_show_of_the_eager_one(
    planting: ModuleType, tmp_path: Path, backend: str, checkpointed: bool
) -> None:
    hooked = Run(tmp_path / "eager", checkpointed=checkpointed)
    planted = Run(tmp_path / "compiled", checkpointed=checkpointed, compiled=backend)
    assert planted.rows.keys() == {(module, str(role)) for module in ("up", "twice", "down") for role in Role}
    calls = {"up": ["up"], "twice": ["twice", "again"], "down": ["down"]}
    for (module, role), row in planted.rows.items():
        found = [same_sums(row, hooked.rows[call, role], exact=backend == "aot_eager") for call in calls[module]]
        assert any(found), (module, role)
    assert planted.n_compiled == planted.n_compiled_before == 1
    assert planted.n_errors == hooked.n_errors == 0
    assert planted.status["planted_probes"]
    assert planted.events[EVENT] == NOT_BIT_EXACT
    for name, row in planted.modules.items():
        assert (row["status"], row["reason"]) == ("probed", NOTE)
        assert row["train_rows"] == sum(hooked.modules[call]["train_rows"] for call in calls[name])


def test_what_is_no_training_graph_is_left_alone(planting: ModuleType) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(function: Callable[..., Any]) -> Any:
        torch.compiler.reset()
        return torch.compile(function, backend=backend, fullgraph=True)

    net, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        compiled(net)(x)
    compiled(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False))(x)
    compiled(lambda x: torch.func.vmap(net)(x))(x)
    graphs.append(torch.export.export(net, (x,)).graph_module)
    assert len(graphs) == 4
    assert not any("mxprobe" in graph.code for graph in graphs)
    compiled(net)(x)
    assert graphs[-1].code.count("mxprobe.observed") == 1
    assert torch.equal(net(x), nn.functional.linear(x, net[0].weight, net[0].bias))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_planted_linear_can_be_scripted(planting: ModuleType) -> None:
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    assert torch.equal(torch.jit.script(net)(x), net(x))


PROGRAM = """
import os, sys, time
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
print(os.path.basename(nn.Linear.forward.__code__.co_filename), "_mxprobe_after_torch" in sys.modules, flush=True)
while not os.path.exists(sys.argv[1]):
    compiled(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
"""


@pytest.mark.slow
def test_a_compiled_job_under_run(tmp_path: Path) -> None:
    """The command as a user gives it, and without the option nothing of it."""
    trace, stop = tmp_path / "t.mxprobe", tmp_path / "stop"
    options = ["--plant-probes", "-o", str(trace)]
    command = [sys.executable, "-c", PROGRAM, str(stop)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*MXPROBE, "run", *options, "--", *command], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "planting.py True\n"
            pid = str(process.pid)
            until(lambda: "operators in the compiled model" in mxprobe("status", pid).stdout, timeout_s=120)
            until(lambda: len(tensors(trace)) > 0, timeout_s=120)
        finally:
            stop.touch()
            process.wait(60)
    roles = {(row.module, row.role) for row in tensors(trace).itertuples()}
    assert roles == {(module, str(role)) for module in ("0", "2") for role in Role}
    plain = subprocess.run([*MXPROBE, "run", "--", *command], capture_output=True, text=True, check=True, env=environ)
    assert (plain.stdout, plain.stderr) == ("linear.py False\n", "")


def tensors(trace: Path) -> Any:
    try:
        return open_trace(trace).tensors()
    except TraceError:
        return []
