"""Runs of every kind that the agent serves, small and seeded, for faults to be planted in: what each of them calls.

No one run calls all of the agent. A function is given its fault in the first run of `KINDS` that calls it, found by
running each of them once with a profiler that notes what code was entered, in whichever thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.agent import boot
from mxprobe.agent.parts.device_steps import DeviceSteps
from mxprobe.agent.parts.warm_up import WarmUp
from tests import moe_models, standin_modules, standin_sinks
from tests.standin_engine import Backend, EngineModel, Mxfp4MoEMethod
from tests.unit import test_batch, test_engines
from tests.watched_run import SINK, Run

CONFIG: dict[str, Any] = {  # of every kind
    "every": 2,
    "weights_every": 4,
    "whatifs": ("of:0.5",),
    "record": True,
    "sensitivity_every": 10,
    "replay_every": 6,
    "replay_arms": ("q", "high"),
    "gradient_probes": 1,
    "error_budget": 6,
}


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Run]
    config: dict[str, Any] = field(default_factory=dict)
    """Beside `CONFIG`."""
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    """Before the fault is planted."""
    asks: tuple[dict[str, Any], ...] = ()
    """Frames that the controller sends once attached."""
    keeps_bits: bool = True
    """False where what it asks for changes the training."""


class TwoSided(Run):
    """A mixture of experts that generates token by token and trains on just that, and a trainer that is handed both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = moe_models.tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses = []
        modules, self._hand_over = test_batch.trl()
        sys.modules.update(modules)

    def step(self) -> None:
        prompts = torch.randint(4, 64, (6, 4))
        ids = self.model.generate(prompts, max_new_tokens=4, do_sample=True, eos_token_id=1, pad_token_id=0)
        logits = self.model(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self._hand_over()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())


class Frameworks(nn.Module):
    """Linears of every framework that there is an adapter for, behind an embedding: as they look on one rank of two."""

    def __init__(self) -> None:
        super().__init__()
        group = standin_modules.Group(0, 2)
        self.embed = nn.Embedding(50, 32)
        self.linears = nn.ModuleDict(
            {
                "te": standin_modules.Linear(32, 32),
                "te_norm": standin_modules.LayerNormLinear(32, 32),
                "te_mlp": standin_modules.LayerNormMLP(32, 64),
                "column": standin_modules.ColumnParallelLinear(32, 64, tp_group=group),
                "row": standin_modules.RowParallelLinear(64, 32, tp_group=group),
                "qat": standin_modules.QATLinear(32, 32),
                "modelopt": standin_modules.QuantLinear(32, 32),
            }
        )
        self.experts = standin_modules.GroupedLinear(3, 32, 32)
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for module in self.linears.values():
            y = module(x)
            x = y[0] if isinstance(y, tuple) else y
        rows = x.flatten(0, 1)
        half = len(rows) // 2
        x = x + self.experts(rows, [half, 0, len(rows) - half]).view_as(x)
        return self.lm_head(nn.functional.layer_norm(x, (32,)))


class Compiled(Run):
    """A compiled model. Its eager steps are not bit for bit those of the graph: with `aot_eager` they are."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
        torch.compiler.reset()
        self._compiled: Any = torch.compile(self.model, backend="aot_eager", fullgraph=True)

    def step(self) -> None:
        loss = self._compiled(torch.randn(4, 8, 32)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())


class Engine(Run):
    """Serves without an optimizer, packed layers and packed experts, and is given new weights now and then."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = EngineModel(test_engines.LAYERS, test_engines.SIZE, packed=True)
        self.model.load_weights(test_engines.weights(1).items())
        experts, _ = test_engines.packed_experts(Mxfp4MoEMethod(Backend.FLASHINFER_TRTLLM_MXFP4_BF16))
        self.model.experts = experts.experts
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # takes no step
        self.losses = []

    def step(self) -> None:
        with torch.no_grad():
            self.losses.append(self.model(torch.randn(4, test_engines.SIZE)).sum().item().hex())
        if len(self.losses) % 5 == 0:
            self.model.load_weights(test_engines.weights(len(self.losses)).items())


class Logger(Run):
    """Logs metrics, and runs no model."""

    def step(self) -> None:
        self.losses.append(torch.rand(1).item().hex())
        sys.modules[SINK].Tracking().log({"loss": 1.0}, step=len(self.losses))


class _Event:
    """`torch.cuda.Event`'s methods, on a device that is never behind."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def with_a_sink(patch: pytest.MonkeyPatch) -> None:
    module, _ = standin_sinks.verl(standin_sinks.WandbRun())
    standin_sinks.install(patch, {SINK: module})


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Steps timed by events, and measured zeros first."""
    patch.setattr(DeviceSteps, "watch", lambda self, roots: setattr(self, "_new_event", _Event))
    patch.setattr(WarmUp, "watch", lambda self, roots: self.compile_for(torch.device("cpu"), torch.float32))


def without_torch(patch: pytest.MonkeyPatch) -> None:
    with_a_sink(patch)
    patch.setattr(boot, "_wait_for_torch", lambda seconds: False)


def with_planted_operators(patch: pytest.MonkeyPatch) -> None:
    from tests.integration import test_planted_probes

    patch.setitem(sys.modules, test_planted_probes.PLANTING, test_planted_probes.load_planting())
    patch.setattr(nn.Linear, "forward", nn.Linear.forward)
    sys.modules[test_planted_probes.PLANTING].plant()


def _set(recipe: str, **members: Any) -> dict[str, Any]:
    return {"verb": "set", "recipe": recipe, **members}


KINDS: dict[str, Kind] = {
    "dense": Kind(Run, prepare=with_a_sink),
    "asked": Kind(Run, asks=(_set("no recipe", id=1), _set("paper", id=2, at_step=10**6), _set("paper", id=3))),
    "experts": Kind(TwoSided, {"sensitivity_every": 6, "replay_arms": ("q", "q_weights", "qstar", "noise", "high")}),
    "frameworks": Kind(lambda: Run(Frameworks)),
    "planted": Kind(Compiled, prepare=with_planted_operators),
    "bare": Kind(Compiled),
    "eager": Kind(Compiled, {"eager_probe_steps": True}),
    "gpu": Kind(Run, {"max_overhead": 0.01}, as_on_a_gpu),
    "engine": Kind(Engine, {"step_timeout_s": 0.3}),
    "logger": Kind(Logger, prepare=without_torch),
    "switched": Kind(Run, asks=(_set("paper", id=1),), keeps_bits=False),
}


def is_shipped(code: CodeType) -> bool:
    """Whether the function runs inside the user's process."""
    return any(f"/mxprobe/{package}/" in code.co_filename for package in ("agent", "measuring"))


def codes_entered(run: Callable[[], Any]) -> set[CodeType]:
    """Of our functions, while `run` runs, in this thread and in those that it starts."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_shipped(frame.f_code):
            entered.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return entered
