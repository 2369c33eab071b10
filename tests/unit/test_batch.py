"""Training batches of every framework, tapped: the tokens that count, on both sides, and what is known of them."""

from __future__ import annotations

import sys
from collections import UserDict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mxprobe.agent.parts.batches import BatchTaps
from mxprobe.agent.taps.batch_readers import BATCH_TAPS
from mxprobe.agent.taps.signal_taps import SignalTaps
from mxprobe.measuring.tokens.mismatch import rollout_rows
from mxprobe.measuring.tokens.training_batch import Batch, Ragged, join, tokens_of
from mxprobe.tables import TABLES
from tests import part_context, standin_sinks

# Three responses of 2, 4 and 3 counted tokens, padded to 4; advantages of each sign.
LENGTHS = (2, 4, 3)
ADVANTAGES = (1.5, -0.5, 0.0)
MASK = torch.tensor([[k < n for k in range(4)] for n in LENGTHS])


def logps(seed: int) -> torch.Tensor:
    return -torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) - 0.1


ROLLOUT, TRAIN = logps(0), logps(1)
D = (ROLLOUT - TRAIN).double()[MASK]


class Heard:
    """`BatchTaps`, always armed, on stand-in modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
        for tap in BATCH_TAPS:
            monkeypatch.delitem(sys.modules, tap.module, raising=False)
        standin_sinks.install(monkeypatch, modules)
        self.batches: list[Batch] = []
        self._told = part_context.told()
        self.errors = self._told.errors
        self.taps = BatchTaps(self._told.context, self.batches.append, lambda: None)
        self._told.context.clock.probed = True
        self.taps.watch([])
        self.taps.begin()

    @property
    def told(self) -> list[str]:
        return self._told.details

    def rows(self) -> dict[str, dict[str, Any]]:
        measured = self.taps.collect()
        assert measured is not None, self.told
        rows = measured.rows(self._told.context.events.tell)
        return {row["stratum"]: row for table, row in rows if table == "rollouts"}


def module(name: str, **members: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    vars(made).update(members)
    return {name: made}


def members(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """What the modules and their classes hold."""
    held = {f"{name}.{key}": value for name, each in modules.items() for key, value in vars(each).items()}
    return {key: dict(vars(value)) if isinstance(value, type) else value for key, value in held.items()}


def lists(x: torch.Tensor) -> list[torch.Tensor]:
    """One tensor a sequence, of its own length."""
    return [row[:n] for row, n in zip(x, LENGTHS, strict=True)]


# One entry a framework: (modules, call). The signatures are those of the versions named in `taps.batches`.


def trl() -> tuple[dict[str, ModuleType], Any]:
    class GRPOTrainer:
        def _compute_loss(self, model: Any, inputs: Any) -> float:
            return 0.5

    inputs = {
        "sampling_per_token_logps": ROLLOUT,
        "old_per_token_logps": TRAIN,
        "completion_mask": torch.ones(3, 4, dtype=torch.long),
        "tool_mask": MASK.long(),
        "advantages": torch.tensor(ADVANTAGES),
    }
    made = module("trl.trainer.grpo_trainer", GRPOTrainer=GRPOTrainer)
    return made, lambda: GRPOTrainer()._compute_loss(None, inputs)


def verl_batch() -> dict[str, torch.Tensor]:
    advantages = torch.tensor(ADVANTAGES)[:, None].expand(3, 4) * MASK
    return {
        "rollout_log_probs": ROLLOUT,
        "old_log_probs": TRAIN,
        "response_mask": MASK.long(),
        "advantages": advantages,
    }


def verl() -> tuple[dict[str, ModuleType], Any]:
    class TrainingWorker:
        def train_batch(self, data: Any) -> float:
            return 0.5

    made = module("verl.workers.engine_workers", TrainingWorker=TrainingWorker)
    return made, lambda: TrainingWorker().train_batch(verl_batch())


def verl_jagged() -> tuple[dict[str, ModuleType], Any]:
    made, _ = verl()
    worker = made["verl.workers.engine_workers"].TrainingWorker
    data = {key: torch.nested.nested_tensor(lists(value), layout=torch.jagged) for key, value in verl_batch().items()}
    return made, lambda: worker().train_batch(data)


def verl_of_old() -> tuple[dict[str, ModuleType], Any]:
    class DataParallelPPOActor:
        def update_policy(self, data: Any) -> float:
            return 0.5

    made = module("verl.workers.actor.dp_actor", DataParallelPPOActor=DataParallelPPOActor)
    return made, lambda: DataParallelPPOActor().update_policy(data=SimpleNamespace(batch=verl_batch()))


def nemo_rl() -> tuple[dict[str, ModuleType], Any]:
    class ClippedPGLossFn:
        def __call__(
            self, next_token_logprobs: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any
        ) -> float:
            return 0.5

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.full((3, 1), 9.0), x.float()), 1)

    data: UserDict[str, torch.Tensor] = UserDict(
        generation_logprobs=shifted(ROLLOUT),
        prev_logprobs=shifted(TRAIN),
        token_mask=shifted(MASK),
        sample_mask=torch.ones(3),
        advantages=shifted(torch.tensor(ADVANTAGES)[:, None].expand(3, 4)),
    )
    made = module("nemo_rl.algorithms.loss.loss_functions", ClippedPGLossFn=ClippedPGLossFn)
    return made, lambda: ClippedPGLossFn()(None, data, None, None)


def slime_like(name: str) -> tuple[dict[str, ModuleType], Any]:
    def policy_loss_function(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> float:
        return 0.5

    batch = {
        "rollout_log_probs": lists(ROLLOUT),
        "log_probs": lists(TRAIN),
        "loss_masks": lists(MASK.int()),
        "advantages": [torch.full((n,), a) for n, a in zip(LENGTHS, ADVANTAGES, strict=True)],
    }
    made = module(name, policy_loss_function=policy_loss_function)
    return made, lambda: made[name].policy_loss_function(None, batch, None, None)


def prime_rl() -> tuple[dict[str, ModuleType], Any]:
    def compute_loss(
        trainer_logprobs: Any, inference_logprobs: Any, advantages: Any, loss_mask: Any, loss_config: Any, scale: int
    ) -> float:
        return 0.5

    made = module("prime_rl.trainer.rl.loss", compute_loss=compute_loss)
    made |= module("prime_rl.trainer.rl.train", compute_loss=compute_loss)  # imported by name
    advantages = [torch.full((n,), a) for n, a in zip(LENGTHS, ADVANTAGES, strict=True)]
    train = [x.clone().requires_grad_() for x in lists(TRAIN)]
    call = made["prime_rl.trainer.rl.train"]
    return made, lambda: call.compute_loss(train, lists(ROLLOUT), advantages, lists(MASK), None, 1)


def areal() -> tuple[dict[str, ModuleType], Any]:
    def grpo_loss_fn(
        logprobs: Any, entropy: Any, input_data: Any, eps_clip: float, current_version: int | None = None
    ) -> float:
        return 0.5

    data = {
        "logprobs": ROLLOUT.flatten(),
        "prox_logp": TRAIN.flatten(),
        "loss_mask": MASK.flatten(),
        "advantages": torch.tensor(ADVANTAGES)[:, None].expand(3, 4).flatten(),
        "versions": torch.tensor([[6], [7], [-1]]).expand(3, 4).flatten(),
    }
    made = module("areal.trainer.ppo.actor", grpo_loss_fn=grpo_loss_fn)
    call = made["areal.trainer.ppo.actor"]
    return made, lambda: call.grpo_loss_fn(TRAIN.flatten(), None, data, 0.2, current_version=7)


FRAMEWORKS = {
    "TRL": trl,
    "verl": verl,
    "verl, jagged": verl_jagged,
    "verl of old": verl_of_old,
    "NeMo-RL": nemo_rl,
    "slime": lambda: slime_like("slime.backends.megatron_utils.loss"),
    "miles": lambda: slime_like("miles.backends.training_utils.loss_hub.losses"),
    "prime-rl": prime_rl,
    "AReaL": areal,
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_batch_of_each_framework_is_read(framework: str, monkeypatch: pytest.MonkeyPatch):
    modules, call = FRAMEWORKS[framework]()
    before = members(modules)
    heard = Heard(monkeypatch, **modules)
    assert call() == 0.5
    rows = heard.rows()
    whole = rows["all"]
    assert set(whole) == {name for name, _ in TABLES["rollouts"]}
    assert whole["step"] == 1
    assert whole["n_tokens"] == sum(LENGTHS)
    assert whole["sum_d"] == pytest.approx(float(D.sum()), abs=1e-6)
    assert whole["sum_d2"] == pytest.approx(float(D.square().sum()), abs=1e-6)
    assert whole["dtype"] == "float32"
    w, advantage = (-D).exp(), torch.tensor(ADVANTAGES)[:, None].expand(3, 4)[MASK]
    false_clip = ((w > 1.2) & (advantage > 0)) | ((w < 0.8) & (advantage < 0))
    assert whole["n_false_clip"] == int(false_clip.sum()) > 0
    assert [rows[f"advantage_{s}"]["n_tokens"] for s in ("positive", "negative", "zero")] == list(LENGTHS)
    if framework == "AReaL":  # packed, without the sequences' boundaries, but with the version of each token
        assert not any(name.startswith("position") for name in rows)
        assert (rows["lag_1"]["n_tokens"], rows["lag_0"]["n_tokens"]) == (2, 4)
    else:
        assert rows["position_0"]["n_tokens"] == rows["length_0"]["n_tokens"] == sum(LENGTHS)
        assert whole["n_sequences"] == 3
    heard.taps.remove()
    assert members(modules) == before
    assert heard.errors == []


def test_the_function_s_own_sinks_stay_audible(monkeypatch: pytest.MonkeyPatch):
    run = standin_sinks.WandbRun()

    class TrainingWorker:
        def train_batch(self, data: Any) -> None:
            run.log({"actor/entropy": 0.5}, step=3)

    modules: dict[str, ModuleType] = {
        **module("verl.workers.engine_workers", TrainingWorker=TrainingWorker),
        **standin_sinks.wandb(run),
    }
    heard = Heard(monkeypatch, **modules)
    rows: list[dict[str, Any]] = []
    signals = SignalTaps(rows.extend, lambda where, error: None, lambda event: None)
    signals.ensure_wrapped()
    TrainingWorker().train_batch(verl_batch())
    signals.unwrap()
    heard.taps.remove()
    assert [row["raw_key"] for row in rows] == ["actor/entropy"]


def test_what_is_missing_is_said_and_nothing_measured(monkeypatch: pytest.MonkeyPatch):
    modules, _ = trl()
    trainer = modules["trl.trainer.grpo_trainer"].GRPOTrainer()
    heard = Heard(monkeypatch, **modules)
    trainer._compute_loss(None, {"old_per_token_logps": TRAIN, "completion_mask": MASK, "advantages": None})
    trainer._compute_loss(None, {"sampling_per_token_logps": ROLLOUT, "completion_mask": MASK, "advantages": None})
    both = {"sampling_per_token_logps": ROLLOUT, "old_per_token_logps": TRAIN}
    trainer._compute_loss(None, both)
    with torch.no_grad():  # an evaluation
        trainer._compute_loss(
            None, {"sampling_per_token_logps": ROLLOUT, "old_per_token_logps": TRAIN, "completion_mask": MASK}
        )
    assert heard.taps.collect() is None
    source = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
    assert heard.told == [
        f"{source} (training batch)",
        f"{source}: the batch does not hold the rollout's log-probabilities",
        f"{source}: the batch does not hold the trainer's log-probabilities",
        f"{source}: the batch does not say which of its tokens count",
    ]
    heard.taps.remove()


def test_another_signature_is_left_alone_and_said(monkeypatch: pytest.MonkeyPatch):
    class TrainingWorker:
        def train_batch(self, batch: Any) -> None: ...

    original = vars(TrainingWorker)["train_batch"]
    modules = module("verl.workers.engine_workers", TrainingWorker=TrainingWorker)
    heard = Heard(monkeypatch, **modules)
    assert vars(TrainingWorker)["train_batch"] is original
    assert "tap not applicable" in heard.told[0]


def test_a_batch_that_is_changed_after_the_call_was_copied(monkeypatch: pytest.MonkeyPatch):
    modules, _ = verl()
    heard = Heard(monkeypatch, **modules)
    data = {key: value.clone() for key, value in verl_batch().items()}
    modules["verl.workers.engine_workers"].TrainingWorker().train_batch(data)
    data["rollout_log_probs"].zero_()
    assert heard.rows()["all"]["sum_d"] == pytest.approx(float(D.sum()), abs=1e-6)
    heard.taps.remove()


def test_tokens_without_a_finite_log_probability_are_counted_apart():
    rollout = ROLLOUT.clone()
    rollout[1, 1], rollout[1, 2] = float("nan"), float("-inf")
    whole, *strata = rollout_rows(tokens_of(Batch(rollout, TRAIN, [MASK], torch.tensor(ADVANTAGES))))
    assert (whole["n_tokens"], whole["n_nonfinite"]) == (7, 2)
    assert all(abs(row["sum_d"]) < 100 for row in (whole, *strata))
    assert {row["stratum"]: row["n_tokens"] for row in strata}["advantage_negative"] == 2


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        tokens_of(Batch(lists(ROLLOUT), lists(TRAIN)[:2], [lists(MASK)], None))
    with pytest.raises(ValueError, match="mask has another shape"):
        tokens_of(Batch(lists(ROLLOUT), lists(TRAIN), [[torch.ones(9)] * 3], None))


def test_positions_and_lengths_are_those_of_counted_tokens():
    ragged = Ragged(torch.arange(6.0) - 9, torch.tensor([0, 2, 6]))
    mask = Ragged(torch.tensor([1, 1, 0, 1, 0, 1]), torch.tensor([0, 2, 6]))
    pairs = tokens_of(Batch(ragged, ragged, [mask], None))
    assert pairs.position is not None
    assert pairs.length is not None
    assert pairs.position.tolist() == [0, 1, 0, 1]
    assert pairs.length.tolist() == [2, 2, 2, 2]
    both = join([pairs, pairs._replace(position=None)])
    assert (both.n_sequences, both.position, len(both.log_prob_train)) == (4, None, 8)
