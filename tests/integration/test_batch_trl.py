"""TRL's own training batch, tapped in a run whose rollout engine returns log-probabilities as vLLM does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standin_controller import agent_thread, controlled, wait_for

job = pytest.importorskip("mxprobe.demo.job")

from torch.optim import optimizer as optimizer_hooks  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

EOS, PAD = 1, 0
SHIFT = 0.3
"""The engine's log-probabilities are off by up to this."""


def engine(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout engine of another precision: it samples from noisy logits and reports their log-probabilities."""
    tokenizer, model = trainer.processing_class, trainer.model
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    ids = tokenizer(prompts, return_tensors="pt", padding=True)["input_ids"]
    n_prompt, log_probs = ids.shape[1], []
    for _ in range(6):
        logits = model(ids).logits[:, -1] if not hasattr(model, "module") else model.module(ids).logits[:, -1]
        logits = logits.detach() + SHIFT * torch.randn(logits.shape, generator=generator)
        z = torch.log_softmax(logits, -1)
        token = torch.multinomial(z.exp(), 1, generator=generator)
        log_probs.append(z.gather(1, token)[:, 0])
        ids = torch.cat((ids, token), 1)
    completions, reported = [], []
    for tokens, values in zip(ids[:, n_prompt:].tolist(), torch.stack(log_probs, 1).tolist(), strict=True):
        n = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        completions.append(tokens[:n])
        reported.append(values[:n])
    reported[0][0] = float("nan")  # a token that the engine could not score
    return {
        "prompt_ids": [row.tolist() for row in ids[:, :n_prompt]],
        "completion_ids": completions,
        "logprobs": reported,
    }


class Trainer(GRPOTrainer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.seen[self.state.global_step + 1] = {
            key: inputs[key].clone()
            for key in ("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "advantages")
        }
        return super()._compute_loss(model, inputs)


@pytest.mark.filterwarnings("ignore")  # TRL sets options that transformers has since renamed
def test_statistics_are_those_of_the_trainer_s_own_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.manual_seed(0)
    before = vars(GRPOTrainer)["_compute_loss"]
    trainer = Trainer(
        model=job.build_model(layers=1, hidden=32),
        reward_funcs=job.copy_reward,
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            num_iterations=2,  # the trainer then keeps the log-probabilities of its policy before the first update
            max_steps=12,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=job.build_dataset(0),
        processing_class=job.build_tokenizer(),
        rollout_func=engine,
    )
    with controlled(tmp_path, every=2, whatifs=()) as controller:

        class Wait(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2:
                    wait_for(controller.attached.is_set, "not attached")
                if state.global_step > 2:  # measured before the next step, however busy the machine
                    n = state.global_step - 2
                    wait_for(lambda: len(controller.rows.get("overhead", [])) >= n, "the step was not told of")

        trainer.add_callback(Wait())
        with agent_thread(controller):
            wait_for(lambda: bool(optimizer_hooks._global_optimizer_post_hooks), "the agent does not watch")
            trainer.train()
            controller.send({"verb": "detach"})
    assert not [row for row in controller.rows["events"] if row["kind"] == "error"]
    found: dict[int, dict[str, Any]] = {}
    for row in controller.rows["rollouts"]:
        found.setdefault(row["step"], {})[row["stratum"]] = row
    assert len(found) >= 3
    for step, rows in found.items():
        seen = trainer.seen[step]
        mask = seen["completion_mask"].bool() & seen["sampling_per_token_logps"].isfinite()
        d = (seen["sampling_per_token_logps"] - seen["old_per_token_logps"]).double()[mask]
        whole = rows["all"]
        assert whole["source"] == "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
        assert whole["n_tokens"] == len(d)
        assert whole["n_nonfinite"] == int(seen["completion_mask"].sum()) - len(d)
        for name, values in (("sum_d", d), ("sum_abs_d", d.abs()), ("sum_k3", (-d).exp() - 1 + d)):
            assert whole[name] == pytest.approx(float(values.sum()), abs=1e-5)
        advantage = seen["advantages"][:, None].expand(mask.shape)[mask]
        for name, chosen in (("positive", advantage > 0), ("negative", advantage < 0)):
            if chosen.any():
                assert rows[f"advantage_{name}"]["sum_d"] == pytest.approx(float(d[chosen].sum()), abs=1e-5)
        assert whole["sum_abs_d"] / whole["n_tokens"] > 0.05
    assert sum(rows["all"]["n_nonfinite"] for rows in found.values()) > 0
    kinds = {(row["raw_key"], row["estimator"]) for row in controller.rows["signals"] if row["framework"] == "mxprobe"}
    assert {
        ("mxprobe/mismatch_k3", "k3"),
        ("mxprobe/mismatch_abs_dp", "prob_diff"),
        ("mxprobe/false_clip", ""),
    } <= kinds
    assert vars(GRPOTrainer)["_compute_loss"] is before
