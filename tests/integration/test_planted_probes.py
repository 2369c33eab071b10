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
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import mxprobe as package
from mxprobe.agent.parts.planted import CHECKPOINTED, EVENT, NOT_BIT_EXACT, NOTE, PLANTING
from mxprobe.attribution import recommend
from mxprobe.errors import TraceError
from mxprobe.schema import COUNTS, ENERGY_SUMS, Role, Verdict
from mxprobe.trace import TraceWriter, open_trace
from tests.attach_targets import MXPROBE, mxprobe, until
from tests.standin_controller import agent_thread, controlled, wait_for
from tests.synthetic import columns_of

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


OUTPUT_ENERGIES = ("ref2", "realised2", "predicted2", "residual2")

Rows = dict[tuple[str, str], dict[str, Any]]


class Run:
    """A model whose weights never change and whose steps are all alike, attached for a few probed steps."""

    def __init__(
        self,
        directory: Path,
        *,
        checkpointed: bool = False,
        compiled: str = "",
        n_probed: int = 2,
        around: bool = False,
    ) -> None:
        """`checkpointed`: a region of the graph; `around`: all of it, by eager code."""
        self.n_compiled = 0
        torch.manual_seed(0)
        self._x = torch.randn(4, 8, 32, requires_grad=checkpointed or around)
        net = Net(checkpointed=checkpointed, by_two=not compiled)
        self.net: Any = torch.compile(net, backend=self._backend, fullgraph=True) if compiled else net
        self._compiled = compiled
        self._around = around
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
        for _ in range(2):
            self.step()
        self.n_compiled_before = self.n_compiled
        directory.mkdir()
        with controlled(directory, every=EVERY, weights_every=EVERY, sensitivity_every=0) as controller:
            with agent_thread(controller):
                self._train_until(lambda: sum(r["probed"] for r in controller.rows.get("overhead", [])) >= n_probed)
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
            self.tables = dict(controller.rows)
            self.outputs = {row["module"]: row for row in controller.rows.get("outputs", [])}
            self.n_errors = controller.frame("detached")["n_errors"]
        self.step()

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.n_compiled += 1
        return torch._dynamo.lookup_backend(self._compiled)(graph, inputs)

    def step(self) -> None:
        y: Any = checkpoint(self.net, self._x, use_reentrant=False) if self._around else self.net(self._x)
        y.square().mean().backward()
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
        note = CHECKPOINTED if checkpointed and name != "down" else NOTE
        assert (row["status"], row["reason"]) == ("probed", note)
        assert row["train_rows"] == sum(hooked.modules[call]["train_rows"] for call in calls[name])

    assert planted.outputs.keys() == ({"down"} if checkpointed else {"up", "twice", "down"})
    for module, row in planted.outputs.items():
        assert any(same_output(row, hooked.outputs[call]) for call in calls[module]), module


def test_a_graph_in_a_checkpointed_region_is_seen_once_and_whole(planting: ModuleType, tmp_path: Path) -> None:
    hooked = Run(tmp_path / "eager", around=True)
    planted = Run(tmp_path / "compiled", around=True, compiled="aot_eager")
    assert planted.n_errors == hooked.n_errors == 0
    assert planted.outputs.keys() == {"up", "twice", "down"}
    for module in ("up", "down"):
        assert same_output(planted.outputs[module], hooked.outputs[module])
        assert planted.modules[module]["train_rows"] == hooked.modules[module]["train_rows"]
        for role in map(str, Role):
            assert same_sums(planted.rows[module, role], hooked.rows[module, role], exact=True), (module, role)


def same_output(row: dict[str, Any], other: dict[str, Any]) -> bool:
    told = ("n_rows", "recipe_x", "recipe_w", "exact")
    return [row[name] for name in told] == [other[name] for name in told] and all(
        row[name] == pytest.approx(other[name], rel=1e-6, abs=1e-12 * other["ref2"]) for name in OUTPUT_ENERGIES
    )


def test_the_verdict_is_that_of_the_eager_model(planting: ModuleType, tmp_path: Path) -> None:
    answers = []
    for name, compiled in (("eager", ""), ("compiled", "aot_eager")):
        run = Run(tmp_path / name, compiled=compiled, n_probed=9)
        with TraceWriter(tmp_path / f"{name}.mxprobe", {}) as writer:
            for table, rows in run.tables.items():
                writer.append(table, columns_of(rows))
        answers.append(recommend(open_trace(tmp_path / f"{name}.mxprobe")))
    eager, planted = answers
    assert planted.verdict is eager.verdict is Verdict.NOTHING_QUANTIZED
    assert (planted.component, planted.chosen) == (eager.component, eager.chosen)


def test_no_output_is_kept_or_computed_again_for_it(planting: ModuleType) -> None:
    """Seen in what passes from the forward to the backward graph, and in the products of the latter."""
    for checkpointed in (False, True):
        kept, products = graph_sizes(checkpointed)
        nn.Linear.forward, planted = nn.Linear.forward.__wrapped__, nn.Linear.forward  # type: ignore[attr-defined]
        plain_kept, plain_products = graph_sizes(checkpointed)
        nn.Linear.forward = planted
        assert plain_kept < kept <= plain_kept + 4 * 4
        assert 0 < products <= plain_products


def graph_sizes(checkpointed: bool) -> tuple[int, int]:
    """(bytes that the forward graph returns, products in the backward graph) of a region and what follows it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    torch.compiler.reset()
    net = torch.compile(Net(checkpointed=checkpointed, by_two=False), backend=backend, fullgraph=True)
    net(torch.randn(4, 8, 32, requires_grad=True)).square().mean().backward()
    forward, backward = graphs
    (returned,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in returned if node is not None and node.op != "placeholder"]
    n_bytes = sum(value.numel() * value.element_size() for value in values)
    return n_bytes, sum("mm" in str(node.target) for node in backward.graph.nodes)


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
