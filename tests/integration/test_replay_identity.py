"""Replaying a microbatch changes not one bit of a training run, whatever its forward keeps, draws or wraps."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

from mxprobe.tables import TABLES
from tests.standin_controller import agent_thread, controlled, wait_for

STEPS = 14
VOCABULARY = 40


class Block(nn.Module):
    """Attention-free, with everything a forward can do to its module: dropout, statistics, counters, randomness."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = parametrizations.spectral_norm(nn.Linear(width, 2 * width))
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            x = x * (1.0 + 0.01 * random.random())
        h = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.drop(self.act(self.up(h))))


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, *, cache: object = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.how.startswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.how == "checkpoint reentrant")
            else:
                x = block(x)
        logits = self.head(x)
        if self.how == "no policy":
            return logits.sum((1, 2))
        return {"logits": logits} if self.how == "mapping" else logits


class Run:
    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.how = how
        self.model = Model(how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[str] = []

    def step(self) -> None:
        for _ in range(2 if self.how == "accumulates" else 1):
            ids = torch.randint(0, VOCABULARY, (6, 10))
            arguments: dict[str, Any] = {"cache": object()} if self.how == "cache" else {}
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.how == "autocast"):
                output = self.model(ids, **arguments)
            logits = output["logits"] if isinstance(output, dict) else output
            if self.how == "no policy":
                loss = logits.square().mean()
            else:
                loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
        if self.how == "keeps gradients":  # the clipped gradient of the step before counts once more
            self.optimizer.step()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())

    def fingerprint(self) -> tuple[list[str], str, object, list[int]]:
        state = [*self.model.state_dict().values(), torch.random.get_rng_state()]
        state += [v for s in self.optimizer.state.values() for v in s.values()]
        state += [p.grad for p in self.model.parameters() if p.grad is not None]
        digest = hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in state)).hexdigest()
        return self.losses, digest, random.getstate(), [block.calls for block in self.model.blocks]


def watched(how: str, directory: Path, **options: Any):
    run = Run(how)
    with controlled(directory, every=1000, weights_every=1000, **options) as controller, agent_thread(controller):
        run.step()
        wait_for(lambda: optimizer_hooks._global_optimizer_post_hooks, "the agent does not watch")
        for _ in range(STEPS - 2):
            run.step()
            time.sleep(0.01)
        controller.send({"verb": "detach"})
        time.sleep(0.3)
        run.step()
        controller.frame("detached")
    return run, controller


def events_of(controller: Any, kind: str) -> list[str]:
    return [row["detail"] for row in controller.rows["events"] if row["kind"] == kind]


@pytest.mark.parametrize(
    "how", ["plain", "mapping", "autocast", "accumulates", "keeps gradients", "checkpoint", "checkpoint reentrant"]
)
def test_a_run_is_bit_identical_with_and_without_replays(how: str, tmp_path: Path):
    alone = Run(how)
    for _ in range(STEPS):
        alone.step()
    arms = 0 if how == "checkpoint reentrant" else 3  # torch warns where such a region runs without gradient
    run, controller = watched(how, tmp_path, sensitivity_every=2, replay_every=arms, replay_arms=("q", "noise"))
    assert run.fingerprint() == alone.fingerprint()
    assert controller.frame("detached")["n_errors"] == 0, events_of(controller, "error")
    if how == "checkpoint reentrant":
        assert any("no gradient reaches 4 modules" in detail for detail in events_of(controller, "sensitivity"))
        assert {row["module"] for row in controller.rows["sensitivity"]} == {"head"}
        return
    rows = controller.rows["sensitivity"]
    assert len({row["step"] for row in rows}) >= 3
    assert {row["module"] for row in rows} == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}
    assert all(set(row) == {name for name, _ in TABLES["sensitivity"]} for row in rows)
    assert all(row["sum_delta2"] > 0 for row in rows if row["component"] == "total")
    assert {row["n_tokens"] for row in rows} == {54.0}, "the last position is not read by the loss"
    replays = controller.rows["replays"]
    assert all(set(row) == {name for name, _ in TABLES["replays"]} for row in replays)
    assert {row["arm"] for row in replays} == {"q", "noise"}
    assert all(row["sum_kl"] > 0 for row in replays)
    gradients = controller.rows["replay_gradients"]
    assert all(set(row) == {name for name, _ in TABLES["replay_gradients"]} for row in gradients)
    assert {row["module"] for row in gradients} == {row["module"] for row in rows}
    assert all(row["ref2"] > 0 and row["err2"] > 0 for row in gradients)
    probed = controller.rows["gradient_probes"]
    assert all(set(row) == {name for name, _ in TABLES["gradient_probes"]} for row in probed)
    by_double_backward = {"double_backward"} if how != "checkpoint" else {"double_backward", "intervention"}
    assert {row["method"] for row in probed} <= by_double_backward
    assert {row["role"] for row in probed} == {"x_fwd", "w_fwd", "g_dgrad", "w_dgrad", "g_wgrad", "x_wgrad"}


@pytest.mark.parametrize(
    ("how", "reason"), [("no policy", "neither logits"), ("cache", "cache is a object, which a second forward")]
)
def test_what_cannot_be_replayed_is_left_alone_and_said(how: str, reason: str, tmp_path: Path):
    alone = Run(how)
    for _ in range(STEPS):
        alone.step()
    run, controller = watched(how, tmp_path, sensitivity_every=1)
    assert run.fingerprint() == alone.fingerprint()
    assert "sensitivity" not in controller.rows
    (detail,) = events_of(controller, "sensitivity")
    assert reason in detail
    assert controller.frame("detached")["n_errors"] == 0


def test_a_replay_that_fails_is_counted_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mxprobe.agent.parts import replays as live

    def broken(*_args: object, **_options: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(live, "measure_sensitivity", broken)
    alone = Run("plain")
    for _ in range(STEPS):
        alone.step()
    run, controller = watched("plain", tmp_path, sensitivity_every=1)
    assert run.fingerprint() == alone.fingerprint()
    assert controller.frame("detached")["n_errors"] == 1
    assert events_of(controller, "error") == ["replaying a call: RuntimeError: planted"]
