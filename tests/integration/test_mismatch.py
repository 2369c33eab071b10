"""Rollout-train mismatch as the agent measures it, against what the run's own tensors say token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mxprobe.agent import worker
from mxprobe.agent.probes.stream_probe import StreamTap
from mxprobe.attribution.layer_divergence import Divergence, first_divergence
from tests.standin_controller import StandinController, agent_thread, controlled, wait_for

job = pytest.importorskip("mxprobe.demo.job")


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FLUSH_EVERY_S", 0.01)


N_SEQUENCES = 24
N_NEW = 8
EOS, PAD = 1, 0


@dataclass
class Loop:
    """A policy that generates and trains on what it generated, step by step; keeps both sides' log-probabilities."""

    model: Any
    temperature: float = 1.0
    fused: bool = True
    micro_batches: int = 1
    padded_prompts: bool = True
    extra_padding: int = 0
    """Columns of padding that the training batch has in front."""
    direct: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fused:
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(self.model, temperature=self.temperature, outputs=("log_probs", "entropy"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.generator = torch.Generator().manual_seed(0)
        self.step = 0

    def take_step(self) -> None:
        self.step += 1
        ids, mask, n_prompt, log_prob_rollout, logits_rollout = self._generate()
        tokens = ids[:, n_prompt:-1]  # the last one is never given back to the model
        ended = (tokens == EOS).cumsum(1) - (tokens == EOS).long() > 0
        order = torch.randperm(len(ids), generator=self.generator)
        log_prob, entropy = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
        self.optimizer.zero_grad()
        for part in order.chunk(self.micro_batches):
            log_probs, entropies = self._train_forward(ids[part], mask[part])
            loss = -(log_probs[:, n_prompt - 1 :] * torch.randn(len(part), 1, generator=self.generator)).mean()
            loss.backward()
            log_prob[part] = log_probs.detach()[:, n_prompt - 1 : -1]
            entropy[part] = entropies.detach()[:, n_prompt - 1 : -1]
        self.optimizer.step()
        z = torch.log_softmax(logits_rollout[:, :-1] / self.temperature, -1)
        self.direct[self.step] = {
            "d": (log_prob_rollout[:, :-1] - log_prob)[~ended].double(),
            "entropy_rollout": -(z.exp() * z).sum(-1)[~ended].double(),
            "entropy_train": entropy[~ended].double(),
        }

    def _generate(self) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor]:
        prompts = torch.randint(4, len(job.VOCABULARY), (N_SEQUENCES, 6), generator=self.generator)
        if self.padded_prompts:
            prompts[::3, :2] = PAD
        mask = (prompts != PAD).long()
        out = self.model.generate(
            input_ids=prompts,
            attention_mask=mask,
            max_new_tokens=N_NEW,
            do_sample=True,
            temperature=self.temperature,
            top_k=0,
            eos_token_id=EOS,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids, logits = out.sequences, torch.stack(out.logits, 1)
        tokens = ids[:, prompts.shape[1] :]
        log_prob = torch.log_softmax(logits / self.temperature, -1).gather(-1, tokens[..., None])[..., 0]
        mask = torch.cat((mask, torch.ones_like(tokens)), 1)
        return ids, mask, prompts.shape[1], log_prob, logits

    def _train_forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T - 1] log-probabilities of the tokens and entropies."""
        if self.extra_padding:
            front = torch.zeros(len(ids), self.extra_padding, dtype=ids.dtype)
            ids, mask = torch.cat((front + PAD, ids), 1), torch.cat((front, mask), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        if self.fused:
            out = self.model(ids, attention_mask=mask, position_ids=positions, labels=ids, fused_lm_head=True)
            log_probs, entropy = out.log_probs, out.entropy
        else:
            logits = self.model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
            z = torch.log_softmax(logits / self.temperature, -1)
            log_probs, entropy = z.gather(-1, ids[:, 1:, None])[..., 0], -(z.exp() * z).sum(-1)
        return log_probs[:, self.extra_padding :], entropy[:, self.extra_padding :]


def policy(*, train: str = "none", rollout: str = "mxfp4", outliers: float = 32.0) -> Any:
    torch.manual_seed(0)
    model = job.build_model(layers=2, hidden=64)
    if outliers:
        job.plant_outliers(model, outliers)
    job.emulate(model, train=train, rollout=rollout)
    return model


def attend(controller: StandinController, loop: Loop, n: int = 10) -> dict[str, list[dict[str, Any]]]:
    from torch.optim import optimizer as optimizer_hooks

    with agent_thread(controller):
        wait_for(lambda: bool(optimizer_hooks._global_optimizer_post_hooks), "the agent does not watch")
        for _ in range(3):  # it looks at a step or two first
            loop.take_step()
        wait_for(controller.attached.is_set, "not attached")
        for _ in range(n):
            n_told = len(controller.rows.get("overhead", []))
            loop.take_step()
            # Measured before the next step, however busy the machine.
            wait_for(lambda n=n_told: len(controller.rows.get("overhead", [])) > n, "the step was not told of")
        controller.send({"verb": "detach"})
        deadline = time.monotonic() + 20
        while not controller.closed.is_set() and time.monotonic() < deadline:
            loop.take_step()
    return controller.rows


def measured(rows: dict[str, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in rows.get("rollouts", []) if row["stratum"] == "all"}


def check_against_direct(rows: dict[str, list[dict[str, Any]]], loop: Loop, *, rel: float = 1e-3) -> None:
    found = measured(rows)
    assert len(found) >= 2
    assert not [row for row in rows["events"] if row["kind"] == "error"]
    for step, row in found.items():
        direct = loop.direct[step]
        d = direct["d"]
        assert (row["n_sequences"], row["n_unmatched"]) == (N_SEQUENCES, 0)
        assert row["n_tokens"] == len(d)
        assert row["temperature"] == loop.temperature
        floor = 1e-6 * len(d)
        assert row["sum_abs_d"] == pytest.approx(float(d.abs().sum()), rel=rel, abs=floor)
        assert row["sum_d"] == pytest.approx(float(d.sum()), rel=rel, abs=rel * float(d.abs().sum()) + floor)
        assert row["sum_k3"] == pytest.approx(float(((-d).exp() - 1 + d).sum()), rel=5 * rel, abs=floor)
        assert row["sum_w2"] == pytest.approx(float((-2 * d).exp().sum()), rel=5 * rel)
        for name in ("entropy_rollout", "entropy_train"):
            assert row[f"sum_{name}"] == pytest.approx(float(direct[name].sum()), rel=rel)


OPTIONS: dict[str, Callable[[], Loop]] = {
    "fused head, temperature 0.7": lambda: Loop(policy(), temperature=0.7),
    "lm_head called": lambda: Loop(policy(), fused=False),
    "micro batches": lambda: Loop(policy(), fused=False, micro_batches=3),
    "padded otherwise": lambda: Loop(policy(), extra_padding=3),
}


@pytest.mark.parametrize(
    "how", [next(iter(OPTIONS)), *(pytest.param(how, marks=pytest.mark.slow) for how in list(OPTIONS)[1:])]
)
def test_the_mismatch_is_that_of_the_run_s_own_tensors(how: str, tmp_path: Path):
    loop = OPTIONS[how]()
    with controlled(tmp_path, every=3, whatifs=()) as controller:
        rows = attend(controller, loop)
    check_against_direct(rows, loop)
    parted = divergence(rows)
    assert (parted.layer, parted.n_layers) == ("model.layers.0", 2)
    last = measured(rows)[max(measured(rows))]
    assert last["sum_abs_d"] / last["n_tokens"] > 0.01


def divergence(rows: dict[str, list[dict[str, Any]]]) -> Divergence:
    found = first_divergence(pd.DataFrame(rows["layers"]))
    assert found is not None
    return found


def test_blocks_whose_fused_path_a_hook_would_switch_off_are_left_alone():
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    streams = StreamTap()
    streams.watch([encoder], lambda on_call: lambda module, args, output: None)
    streams.arm()
    assert not any(module._forward_hooks for module in encoder.modules())
    model = job.build_model(layers=2, hidden=64)
    streams.watch([model], lambda on_call: lambda module, args, output: None)
    streams.arm()
    assert [len(layer._forward_hooks) for layer in model.model.layers] == [1, 1]
    streams.remove()
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_the_first_block_that_rollout_computes_otherwise_is_named(tmp_path: Path):
    model = policy(train="mxfp4", rollout="mxfp4", outliers=0.0)
    job.emulate(model.model.layers[1], train="mxfp4", rollout="none")
    with controlled(tmp_path, every=3, whatifs=()) as controller:
        parted = divergence(attend(controller, Loop(model)))
    assert parted.layer == "model.layers.1"
    assert parted.difference > 100 * parted.floor


def logprob_events(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [row["detail"] for row in rows["events"] if row["kind"] == "logprobs"]


def test_equal_sides_give_the_floor(tmp_path: Path):
    loop = Loop(policy(train="mxfp4", rollout="mxfp4", outliers=0.0))
    with controlled(tmp_path, every=3, whatifs=()) as controller:
        rows = attend(controller, loop, 8)
    found = measured(rows)
    assert len(found) >= 2
    for step, row in found.items():
        assert row["sum_abs_d"] / row["n_tokens"] < 3e-3
        assert float(loop.direct[step]["d"].abs().mean()) < 3e-3
    assert {row["weight_lag"] for row in rows["outputs"]} == {0}
    assert divergence(rows).layer is None


def test_training_is_bit_identical_with_generation_and_a_fused_head(tmp_path: Path):
    def trained(controller: StandinController | None) -> tuple[list[torch.Tensor], torch.Tensor]:
        loop = Loop(policy())
        if controller is None:
            while loop.step < 30:
                loop.take_step()
        else:
            attend(controller, loop, 8)
            assert loop.step <= 30
            while loop.step < 30:
                loop.take_step()
        return [p.detach().clone() for p in loop.model.parameters()], torch.random.get_rng_state()

    alone = trained(None)
    with controlled(tmp_path, every=2) as controller:
        attended = trained(controller)
        assert len(measured(controller.rows)) >= 2
    assert all(torch.equal(a, b) for a, b in zip(alone[0], attended[0], strict=True))
    assert torch.equal(alone[1], attended[1])


@dataclass
class OddLoop(Loop):
    how: str = ""

    def take_step(self) -> None:
        self.step += 1
        ids, mask, *_ = self._generate() if self.how != "by hand" else (*self._by_hand(), None)
        if self.how == "packed":
            ids, mask = ids.reshape(1, -1), mask.reshape(1, -1)
        self.optimizer.zero_grad()
        log_probs, _ = self._train_forward(ids, mask)
        (-log_probs.mean()).backward()
        self.optimizer.step()

    def _by_hand(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(4, len(job.VOCABULARY), (N_SEQUENCES, 6), generator=self.generator)
        with torch.no_grad():
            out = self.model(ids, use_cache=True)
            for _ in range(4):
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat((ids, token), 1)
                out = self.model(token, cache=out.past_key_values, use_cache=True)
        return ids, torch.ones_like(ids)


def scaled(model: Any) -> Any:
    """Its logits are no longer what its lm_head returned."""
    model.register_forward_hook(lambda _m, _a, out: type(out)(**{**out, "logits": 2.0 * out.logits}))
    return model


ODD: dict[str, tuple[Callable[[], Loop], str]] = {
    "by hand": (lambda: OddLoop(policy(), fused=False, how="by hand"), "generation is not by transformers' generate()"),
    "scaled logits": (lambda: OddLoop(scaled(policy()), fused=False), "other logits than its lm_head's"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_measured_is_said_and_not_guessed(name: str, tmp_path: Path):
    make, reason = ODD[name]
    with controlled(tmp_path, every=3, whatifs=()) as controller:
        rows = attend(controller, make(), 8)
    assert not rows.get("rollouts")
    assert any(reason in detail for detail in logprob_events(rows)), logprob_events(rows)


@pytest.mark.slow
def test_of_sequences_packed_into_one_row_only_the_first_is_recognised(tmp_path: Path):
    """It begins the row, so that nothing but its own tokens stands before them; the others count as unmatched."""
    with controlled(tmp_path, every=3, whatifs=()) as controller:
        rows = attend(controller, OddLoop(policy(), fused=False, padded_prompts=False, how="packed"), 8)
    found = measured(rows)
    assert found
    assert {(row["n_sequences"], row["n_unmatched"]) for row in found.values()} == {(1, N_SEQUENCES - 1)}
