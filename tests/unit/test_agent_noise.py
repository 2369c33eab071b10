"""Noise on weights is told where it acts, by its size, and the training forward is measured with its own weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_hooks

from mxprobe.attribution.weight_changes import weight_changes
from mxprobe.emulation.aqn import NoiseSchedule, QuantizationNoise
from mxprobe.events import WEIGHT_NOISE, Event
from mxprobe.measuring.versions.weight_noise import change
from tests.standin_controller import StandinController, agent_thread, controlled, wait_for

BATCH, TOKENS, WIDTH = 4, 6, 64
SIGMA = 0.02


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


Around = Callable[[Policy], AbstractContextManager[Any]]


def plain(policy: Policy) -> AbstractContextManager[Any]:
    return nullcontext()


def noisy(target: Any) -> Around:
    def around(policy: Policy) -> AbstractContextManager[Any]:
        noise = QuantizationNoise(policy, NoiseSchedule(SIGMA, SIGMA, stages=2), target=target)
        return noise.rollout(progress=1.0)

    return around


class Adapter(AbstractContextManager[Any]):
    """A rank-1 change of one weight, merged while it generates."""

    def __init__(self, policy: Policy) -> None:
        self._weight = policy.layers[0].weight
        self._before = self._weight.detach().clone()

    def __enter__(self) -> None:
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            self._weight += 0.01 * torch.outer(torch.randn(WIDTH, generator=g), torch.randn(WIDTH, generator=g))

    def __exit__(self, *args: object) -> None:
        with torch.no_grad():
            self._weight.copy_(self._before)


def take_step(policy: Policy, optimizer: torch.optim.Optimizer, *, rollout: Around, evaluation: Around | None) -> None:
    ids = torch.randint(0, 16, (BATCH, TOKENS))
    with torch.no_grad():
        with rollout(policy):
            policy(ids)
            policy(ids[:, :1])
        if evaluation is not None:
            with evaluation(policy):
                policy(ids)
    policy(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def attend(controller: StandinController, n: int, **sides: Any) -> dict[str, list[dict[str, Any]]]:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    with agent_thread(controller):
        wait_for(lambda: bool(optimizer_hooks._global_optimizer_post_hooks), "the agent does not watch")
        for _ in range(3):
            take_step(policy, optimizer, **sides)
        wait_for(controller.attached.is_set, "not attached")
        for _ in range(n):
            n_told = len(controller.rows.get("overhead", []))
            take_step(policy, optimizer, **sides)
            wait_for(lambda n=n_told: len(controller.rows.get("overhead", [])) > n, "the step was not told of")
        controller.send({"verb": "detach"})
        while not controller.closed.wait(0.01):
            take_step(policy, optimizer, **sides)
    return controller.rows


def noise_events(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [row["detail"] for row in rows["events"] if row["kind"] == "weight_noise"]


def rows_of(directory: Path, *, rollout: Around = plain, evaluation: Around | None = None) -> Any:
    with controlled(directory, every=2, weights_every=2, whatifs=(), max_overhead=0.0) as controller:
        rows = attend(controller, 5, rollout=rollout, evaluation=evaluation)
    assert not [row for row in rows["events"] if row["kind"] == "error"]
    return rows


def test_nothing_is_told_of_weights_that_are_the_trainers(tmp_path: Path) -> None:
    assert noise_events(rows_of(tmp_path, evaluation=plain)) == []


def test_noise_on_norms_in_rollout_is_told_once(tmp_path: Path) -> None:
    (detail,) = noise_events(rows_of(tmp_path, rollout=noisy("rmsnorm"), evaluation=plain))
    assert detail.startswith("norms rollout: the weights of 2 of 2 norms differ from the trainer's own by noise of")
    assert float(detail.split()[-1]) == pytest.approx(SIGMA, rel=0.3)


def test_noise_left_on_in_evaluation_is_told(tmp_path: Path) -> None:
    (detail,) = noise_events(rows_of(tmp_path, evaluation=noisy("rmsnorm")))
    assert detail.startswith("norms eval: the weights of 2 of 2 norms")


def test_noise_on_linears_leaves_training_explained(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, rollout=noisy("weights"))
    details = noise_events(rows)
    assert {detail.partition(":")[0] for detail in details} == {"layers.0 rollout", "layers.1 rollout"}
    assert all(float(d.split()[-1]) == pytest.approx(SIGMA, rel=0.3) for d in details)
    assert all(row["exact"] for row in rows["outputs"])
    assert {row["phase"] for row in rows["outputs"]} == {"train", "rollout"}


def test_a_merged_adapter_is_no_noise(tmp_path: Path) -> None:
    (detail,) = noise_events(rows_of(tmp_path, rollout=Adapter))
    assert detail.startswith("layers.0 rollout: weights differ from the trainer's own by a change of low rank")


@pytest.mark.parametrize("shape", [(64, 64), (8, 4096), (300, 20)])
def test_the_size_and_the_kind_of_a_change(shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=g)
    assert change(w, w.clone()) is None
    found = change(w + 0.01 * torch.randn(shape, generator=g), w)
    assert found is not None
    assert found.sigma == pytest.approx(0.01, rel=0.05)
    n, k = sorted(shape)
    assert found.evenness == pytest.approx(1 / (1 + n / k), rel=0.1)
    low = change(w + torch.outer(torch.randn(shape[0], generator=g), torch.randn(shape[1], generator=g)), w)
    assert low is not None
    assert low.evenness == pytest.approx(1 / n, rel=1e-6)


def test_what_has_ended_is_not_told_of_a_trace() -> None:
    told = [
        Event(WEIGHT_NOISE, "layers.0", "noise", {"phase": "rollout", "sigma": 0.01}),
        Event(WEIGHT_NOISE, "norms", "norms_noise", {"phase": "rollout", "n_changed": 2, "n_norms": 2, "sigma": 0.1}),
        Event(WEIGHT_NOISE, "layers.0", "own", {"phase": "rollout"}),
        Event(WEIGHT_NOISE, "layers.1", "noise", {"phase": "eval", "sigma": 0.03}),
        Event("recipe", "layers.1", "changed", {"phase": "eval", "recipe": "mxfp4", "before": "none"}),
    ]
    events = pd.DataFrame([{"step": 1, **event.columns()} for event in told])
    assert list(weight_changes(events, "rollout")) == ["norms"]
    assert weight_changes(events, "eval")["layers.1"].endswith("relative rms 0.03")
    assert weight_changes(events, "train") == {}
