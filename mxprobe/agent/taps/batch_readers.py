"""Readers of training batches: where each framework holds both sides' log-probabilities, and under which names.

Versions looked at: TRL 1.16 and verl 0.9.1 (installed); NeMo-RL, slime, miles, prime-rl and AReaL of autumn 2026
(source). TRL fills `sampling_per_token_logps` with vLLM only. In verl's bypass mode and wherever else a framework
copies the rollout's numbers over the trainer's, the two are the same and nothing can be told from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mxprobe.agent.taps.tap_table import Tap
from mxprobe.measuring.isolation import is_plain, undisturbed
from mxprobe.measuring.tokens.training_batch import Batch, Ragged

Arguments = Mapping[str, Any]


def in_mapping(argument: str, rollout: str, train: str, mask: str, advantage: str, also_mask: str = "") -> Any:
    """Return the reader of a function that takes the batch as a mapping under the name `argument`."""

    def read(arguments: Arguments) -> Batch:
        data = arguments[argument]
        masks = _present(_get(data, mask), _get(data, also_mask))
        return Batch(_get(data, rollout), _get(data, train), masks, _get(data, advantage))

    return read


def nemo_rl(arguments: Arguments) -> Batch:
    """Read tensors [B, T + 1]: what stands at a position was given to the token there, so the first has none."""
    data = arguments["data"]

    def rest(key: str) -> Any:
        value = _get(data, key)
        return value[:, 1:] if isinstance(value, torch.Tensor) and value.dim() == 2 else value

    masks = _present(rest("token_mask"), _get(data, "sample_mask"))
    return Batch(rest("generation_logprobs"), rest("prev_logprobs"), masks, rest("advantages"))


def prime_rl(arguments: Arguments) -> Batch:
    """Read lists with one tensor per packed sequence; the trainer's side is that of the update itself."""
    rollout, train = arguments["inference_logprobs"], arguments["trainer_logprobs"]
    return Batch(rollout, train, [arguments["loss_mask"]], arguments["advantages"])


def areal(arguments: Arguments) -> Batch:
    """Read `logprobs` of the batch as the rollout's, and as the trainer's `prox_logp` or else the update's own."""
    data = arguments["input_data"]
    train = _get(data, "prox_logp")
    now = arguments.get("current_version")
    return Batch(
        _get(data, "logprobs"),
        arguments["logprobs"] if train is None else train,
        _present(_get(data, "loss_mask")),
        _get(data, "advantages"),
        _get(data, "versions"),
        now if isinstance(now, int) else None,
    )


_TRL = ("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "advantages", "tool_mask")
_VERL = in_mapping("data", "rollout_log_probs", "old_log_probs", "response_mask", "advantages")
_SLIME = in_mapping("batch", "rollout_log_probs", "log_probs", "loss_masks", "advantages")
_PRIME_RL = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")

BATCH_TAPS: tuple[Tap, ...] = (
    Tap(
        "trl.trainer.grpo_trainer",
        "GRPOTrainer",
        "_compute_loss",
        ("model", "inputs"),
        in_mapping("inputs", *_TRL),
        "trl",
    ),
    Tap("verl.workers.engine_workers", "TrainingWorker", "train_batch", ("data",), _VERL, "verl"),
    Tap("verl.workers.actor.dp_actor", "DataParallelPPOActor", "update_policy", ("data",), _VERL, "verl"),  # up to 0.8
    *(
        Tap(f"nemo_rl.algorithms.{module}", "ClippedPGLossFn", "__call__", ("data",), nemo_rl, "nemo-rl")
        for module in ("loss.loss_functions", "loss_functions")
    ),
    *(
        Tap(f"{framework}.backends.{module}", "", "policy_loss_function", ("batch", "logits"), _SLIME, framework)
        for framework, module in (
            ("slime", "megatron_utils.loss"),
            ("miles", "training_utils.loss_hub.losses"),
            ("miles", "training_utils.loss.hub.losses"),
            ("miles", "training_utils.loss"),
        )
    ),
    Tap(
        "prime_rl.trainer.rl.loss",
        "",
        "compute_loss",
        _PRIME_RL,
        prime_rl,
        "prime-rl",
        also=(("prime_rl.trainer.rl.train", "compute_loss"),),
    ),
    *(
        Tap(f"areal.{module}.ppo.actor", "", "grpo_loss_fn", ("logprobs", "entropy", "input_data"), areal, "areal")
        for module in ("trainer", "engine")
    ),
)


def copied(value: Any, max_sequences: int) -> Any:
    """Copy the first sequences of a batch's tensors on their device, without waiting; None where not readable."""
    if isinstance(value, Ragged):
        return value
    if isinstance(value, torch.Tensor):
        if getattr(value, "is_nested", False):
            nested: Any = value
            return Ragged(_copy(nested.values()), _copy(nested.offsets()))
        return _copy(value if value.dim() == 1 else value[:max_sequences]) if is_plain(value) else None
    if isinstance(value, (list, tuple)):
        parts = [copied(item, max_sequences) for item in value[:max_sequences]]
        return None if any(part is None for part in parts) else parts
    return float(value) if isinstance(value, (int, float)) else None


def _present(*values: Any) -> list[Any]:
    return [each for each in values if each is not None]


def _copy(value: torch.Tensor) -> torch.Tensor:
    with undisturbed(value.device.type):
        return value.detach().clone()


def _get(data: Any, key: str) -> Any:
    """Return an entry of a dict, a TensorDict, a BatchedDataDict, or of a DataProto's tensors; None without."""
    inner = getattr(data, "batch", None)
    source: Any = inner if inner is not None and not isinstance(data, Mapping) else data
    try:
        return source[key] if key in source.keys() else None  # noqa: SIM118  `in` means other things to a TensorDict
    except (KeyError, TypeError, AttributeError):
        return None
