"""Attaching and detaching changes not one bit of a training run, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.standin_controller import StandinController, agent_thread, controlled, wait_for

STEPS, ATTACH_AT, DETACH_AT = 36, 4, 24


class Block(nn.Module):
    def __init__(self, width: int = 32, *, in_place: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=in_place)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.drop(self.act(self.up(x)).clone()))
        if not self.act.inplace:
            return x + y
        y += x
        return y


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], *, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, 50, bias=False)
        if how == "tied":
            self.head.weight = self.embed.weight
        self.how = how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self._run(block, x)
        return self.head(x)

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.how == "checkpoint":
            return checkpoint(block, x, use_reentrant=False)
        if self.how == "reentrant":
            return checkpoint(block, x, use_reentrant=True)
        if self.how == "selective":
            return checkpoint(block, x, use_reentrant=False, context_fn=_save_some)
        return block(x)


def _save_some():
    """Save products and what our own copies are made with: an operator of ours in the list would shift the rest."""
    saved = {
        torch.ops.aten.addmm.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.index_select.default,
        torch.ops.aten._unsafe_view.default,
    }

    def policy(_ctx: object, operator: object, *_args: object, **_options: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Experts(nn.Module):
    """Four experts in one parameter each, one product per expert that is sent a token: as transformers' eager loop."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 2 * width, width) * 0.2)
        self.down = nn.Parameter(torch.randn(4, width, 2 * width) * 0.2)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(4):
            (token,) = torch.where(chosen == expert)
            if len(token):
                hidden = nn.functional.relu(nn.functional.linear(x[token], self.up[expert]))
                hidden = nn.functional.dropout(hidden, 0.1, self.training)
                out.index_add_(0, token, nn.functional.linear(hidden, self.down[expert]).to(out.dtype))
        return out


class TopKRouter(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width) * 0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(x, self.weight)
        score, chosen = logits.softmax(-1).topk(1)
        return logits, score, chosen


class MoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)
        self.gate = TopKRouter()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.mix(x).flatten(0, 1)
        _, score, chosen = self.gate(flat)
        return x + (self.experts(flat, chosen[:, 0]) * score.to(x.dtype)).view_as(x)


def build(how: str) -> Model:
    if how == "parametrized":
        blocks: list[nn.Module] = [Block(), parametrizations.spectral_norm(nn.Linear(32, 32))]
    elif how == "shared":
        block = Block()
        blocks = [block, block]
    elif how.startswith("moe"):
        blocks = [MoeBlock(), MoeBlock()]
        how = how.partition("_")[2] or how
    elif how == "encoder":
        blocks = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)]
    else:
        in_place = how != "selective"  # what is saved must not be changed in place
        blocks = [Block(in_place=in_place), Block(in_place=in_place)]
    return Model(blocks, how=how)


class Run:
    """A seeded run, one step at a time; `fingerprint` covers all that training depends on."""

    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        self.how = how
        self.model = build(how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[str] = []

    def step(self) -> None:
        if self.how.endswith("generates"):
            self._generate()
        for _ in range(2 if self.how == "accumulates" else 1):
            tokens = torch.randint(0, 50, (8, 12))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.how.endswith("autocast")):
                loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())

    @torch.no_grad()
    def _generate(self) -> None:
        tokens = torch.randint(0, 50, (8, 4))
        self.model(tokens)
        for _ in range(3):
            probabilities = self.model(tokens[:, -1:])[:, -1].softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), 1)

    def fingerprint(self) -> tuple[list[str], str]:
        state = [*self.model.state_dict().values(), torch.random.get_rng_state()]
        state += [v for s in self.optimizer.state.values() for v in s.values()]
        digest = hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in state)).hexdigest()
        return self.losses, digest


def attended(run: Run, controller: StandinController) -> None:
    """The same steps, with the agent attached after ATTACH_AT and asked to leave after DETACH_AT."""
    for _ in range(ATTACH_AT):
        run.step()
    with agent_thread(controller):
        for step in range(ATTACH_AT, STEPS):
            if step == ATTACH_AT:
                wait_for(lambda: optimizer_hooks._global_optimizer_post_hooks, "the agent does not watch")
            run.step()
            if step == ATTACH_AT + 2:
                assert controller.frame("attached")["role"] == "trainer"
                controller.send({"verb": "trigger", "reason": "test"})
            if ATTACH_AT + 2 < step < DETACH_AT:
                time.sleep(0.02)
            if step in (DETACH_AT - 8, DETACH_AT - 4):  # however slow measuring is here
                n_due = 1 if step == DETACH_AT - 8 else 2
                wait_for(lambda n=n_due: len(probed_rows(controller)) >= n, f"{n_due} probed steps are not measured")
            if step == DETACH_AT:
                controller.send({"verb": "detach"})
                time.sleep(0.3)
            if step == DETACH_AT + 1:
                controller.frame("detached")


def probed_rows(controller: StandinController) -> list[dict[str, object]]:
    """Of table `overhead`: a probed step's row comes once the step is measured."""
    return [row for row in controller.rows.get("overhead", []) if row["probed"]]


def assert_nothing_left(model: nn.Module) -> None:
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        assert not any(hooks)
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    assert not optimizer_hooks._global_optimizer_post_hooks
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mxprobe")]


@pytest.mark.parametrize(
    "how",
    [
        "plain",
        "tied",
        "shared",
        "checkpoint",
        "reentrant",
        "selective",
        "autocast",
        "accumulates",
        "parametrized",
        "generates",
        "encoder",
        "moe",
        "moe_checkpoint",
        "moe_reentrant",
        "moe_selective",
        "moe_generates",
        "moe_autocast",
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_run_is_bit_identical_with_and_without(how: str, tmp_path: Path):
    alone = Run(how)
    for _ in range(STEPS):
        alone.step()
    watched = Run(how)
    record = how not in ("plain", "parametrized")
    with controlled(tmp_path, every=3, weights_every=3, whatifs=("of:0.5",), record=record) as controller:
        attended(watched, controller)
    assert watched.fingerprint() == alone.fingerprint()
    assert_nothing_left(watched.model)

    detached = controller.frame("detached")
    assert detached["n_errors"] == 0, [row for row in controller.rows["events"] if row["kind"] == "error"]
    assert detached["probed_steps"] >= 2
    _check_rows(how, controller)
    _check_flight(watched.model, controller.rows.get("flight", []), record=record)


def _check_rows(how: str, controller: StandinController) -> None:
    outputs, tensors = controller.rows["outputs"], controller.rows["tensors"]
    phases = {row["phase"] for row in outputs}
    assert controller.frame("detached")["n_abandoned"] == 0

    assert phases == ({"train", "rollout"} if how.endswith("generates") else {"train"})
    assert {row["role"] for row in tensors if row["module"] == "head"} == {
        "x_fwd",
        "w_fwd",
        "g_dgrad",
        "w_dgrad",
        "g_wgrad",
        "x_wgrad",
    }
    if how.startswith("moe"):
        roles = {(row["module"].rpartition(".")[2], row["role"]) for row in tensors}
        assert {module for module, _ in roles} == {"mix", "gate", "up", "down", "head"}
        assert len(roles) == 5 * 6
    if how != "encoder":  # whose Linears are left alone
        with_gradient = {row["module"] for row in tensors if row["role"] == "g_dgrad"}
        assert with_gradient == {row["module"] for row in tensors}, "an output changed in place has a gradient too"
    keys = [(row["step"], row["module"], row["role"]) for row in tensors]
    assert len(keys) == len(set(keys)), "an operand was measured twice in one step"
    assert all(row["exact"] for row in outputs), "nothing is quantized here"
    last = {row["module"]: row for row in controller.rows["modules"]}
    expected_rows = 96 * (2 if how in ("accumulates", "shared") else 1)
    seen = {name: row["train_rows"] for name, row in last.items() if row["status"] == "probed"}
    assert "head" in seen
    assert {rows for name, rows in seen.items() if name != "head"} <= {expected_rows}
    steps = [row["step"] for row in controller.rows["overhead"]]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert steps[0] in (ATTACH_AT + 2, ATTACH_AT + 3)


def _check_flight(model: Model, rows: list[dict[str, object]], *, record: bool):
    if not record:
        assert not rows
        return
    gradients = {row["name"] for row in rows if row["kind"] == "gradient"}
    assert gradients == {name for name, _ in model.named_parameters()}
    outputs = [row["name"] for row in rows if row["kind"] == "output" and row["step"] == rows[-1]["step"]]
    leaves = [name for name, module in model.named_modules() if not any(True for _ in module.children())]
    assert outputs[0] == "embed"
    assert outputs[-1] == "head"
    assert len(outputs) == len(set(outputs))
    assert set(outputs) == {name for name in leaves if model.how != "encoder" or not name.startswith("blocks")}


def test_an_agent_that_fails_at_every_call_takes_itself_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Errors are swallowed, counted, told once, and end in the agent's own departure; the run does not notice."""
    from mxprobe.agent.probes import module_probe as hooks

    def broken(*_args: object, **_options: object) -> Callable[[], None]:
        raise RuntimeError("planted")

    alone = Run("plain")
    for _ in range(STEPS):
        alone.step()
    monkeypatch.setattr(hooks, "sample_weight", broken)
    watched = Run("plain")
    with controlled(tmp_path, every=1, error_budget=6) as controller, agent_thread(controller):
        wait_for(lambda: optimizer_hooks._global_optimizer_post_hooks, "the agent does not watch")
        for _ in range(STEPS):
            watched.step()
            time.sleep(0.005)
        detached = controller.frame("detached")
    assert watched.fingerprint() == alone.fingerprint()
    assert detached["reason"] == "error_budget"
    assert detached["n_errors"] == 7
    errors = [row["detail"] for row in controller.rows["events"] if row["kind"] == "error"]
    assert len(errors) == len(set(errors)) == 5
    assert errors[0] == "forward hook of blocks.0.up: RuntimeError: planted"
    assert_nothing_left(watched.model)
