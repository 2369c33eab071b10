"""Canonical metric names, and which key of which framework means which of them.

Frameworks log the same quantity under different names, and different quantities under the same name; so each
alias names its estimator too. Keys that no alias covers stay in the trace with an empty `metric`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A canonical training metric."""

    name: str
    unit: str
    """`nats`, `1` for pure numbers, `frac` for shares in [0, 1], `tokens`, `s`."""
    description: str


@dataclass(frozen=True)
class Alias:
    """A framework's key for a canonical metric and the estimator behind it."""

    metric: str
    estimator: str = ""


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("reward_mean", "1", "mean reward of the completions, all reward functions together"),
        Metric("reward_std", "1", "standard deviation of the reward over the completions"),
        Metric("reward_function_mean", "1", "mean of one reward function; the raw key names it"),
        Metric("reward_function_std", "1", "standard deviation of one reward function; the raw key names it"),
        Metric("dead_groups", "frac", "prompt groups whose rewards are all equal: no advantage, no gradient"),
        Metric("entropy", "nats", "policy entropy per generated token"),
        Metric("entropy_coef", "1", "weight of the entropy bonus"),
        Metric("kl_ref", "nats", "KL divergence of the policy to the reference model, per token"),
        Metric("kl_update", "nats", "KL divergence of the policy over one update, per token"),
        Metric("mismatch_logp_abs_mean", "nats", "|log-probability by the rollout engine - by the trainer|, mean"),
        Metric("mismatch_logp_abs_max", "nats", "|log-probability by the rollout engine - by the trainer|, maximum"),
        Metric("mismatch_ratio_min", "1", "importance ratio of trainer to rollout engine, minimum"),
        Metric("mismatch_ratio_mean", "1", "importance ratio of trainer to rollout engine, mean"),
        Metric("mismatch_ratio_max", "1", "importance ratio of trainer to rollout engine, maximum"),
        Metric("clip_ratio", "frac", "tokens whose update was clipped, on either side"),
        Metric("clip_ratio_low", "frac", "tokens clipped on the low side"),
        Metric("clip_ratio_high", "frac", "tokens clipped on the high side"),
        Metric("length_mean", "tokens", "completion length, mean"),
        Metric("length_min", "tokens", "completion length, minimum"),
        Metric("length_max", "tokens", "completion length, maximum"),
        Metric("length_terminated_mean", "tokens", "length of the completions that ended by themselves, mean"),
        Metric("truncated", "frac", "completions cut at the length limit"),
        Metric("grad_norm", "1", "global gradient norm before clipping"),
        Metric("loss", "1", "training loss"),
        Metric("policy_loss", "1", "policy part of the loss, without the entropy bonus"),
        Metric("router_aux_loss", "1", "load-balancing loss of a mixture of experts"),
        Metric("learning_rate", "1", "learning rate of the first parameter group"),
        Metric("epoch", "1", "passes over the training data"),
        Metric("tokens_seen", "tokens", "input tokens seen since the start"),
        Metric("step_time", "s", "wall time of one training step"),
        Metric("train_runtime", "s", "wall time of the whole training, logged once at its end"),
    )
}

# transformers 5.24, `Trainer.log`.
_TRANSFORMERS: dict[str, Alias] = {
    "loss": Alias("loss", "mean since last log"),
    "grad_norm": Alias("grad_norm"),
    "learning_rate": Alias("learning_rate"),
    "epoch": Alias("epoch"),
    "num_input_tokens_seen": Alias("tokens_seen"),
    "train_runtime": Alias("train_runtime"),
}

# TRL 1.16, `GRPOTrainer.log`: means over the steps since the last log.
_TRL: dict[str, Alias] = {
    **_TRANSFORMERS,
    "reward": Alias("reward_mean"),
    "reward_std": Alias("reward_std"),
    "frac_reward_zero_std": Alias("dead_groups"),
    "entropy": Alias("entropy", "full vocabulary, token mean"),
    "entropy_coef": Alias("entropy_coef"),
    "kl": Alias("kl_ref", "k3"),
    "sampling/sampling_logp_difference/mean": Alias("mismatch_logp_abs_mean", "|d| of sampled tokens"),
    "sampling/sampling_logp_difference/max": Alias("mismatch_logp_abs_max", "|d| of sampled tokens"),
    "sampling/importance_sampling_ratio/min": Alias("mismatch_ratio_min"),
    "sampling/importance_sampling_ratio/mean": Alias("mismatch_ratio_mean"),
    "sampling/importance_sampling_ratio/max": Alias("mismatch_ratio_max"),
    "clip_ratio/region_mean": Alias("clip_ratio", "token mean"),
    "clip_ratio/low_mean": Alias("clip_ratio_low", "token mean"),
    "clip_ratio/high_mean": Alias("clip_ratio_high", "token mean"),
    "completions/mean_length": Alias("length_mean"),
    "completions/min_length": Alias("length_min"),
    "completions/max_length": Alias("length_max"),
    "completions/mean_terminated_length": Alias("length_terminated_mean"),
    "completions/clipped_ratio": Alias("truncated"),
    "policy_loss": Alias("policy_loss"),
    "aux_loss": Alias("router_aux_loss"),
    "num_tokens": Alias("tokens_seen"),
    "step_time": Alias("step_time"),
}

ALIASES: dict[str, dict[str, Alias]] = {"trl": _TRL, "transformers": _TRANSFORMERS}

_PATTERNS: dict[str, tuple[tuple[re.Pattern[str], Alias], ...]] = {
    "trl": (
        (re.compile(r"rewards/.+/mean"), Alias("reward_function_mean")),
        (re.compile(r"rewards/.+/std"), Alias("reward_function_std")),
    ),
}


def resolve(framework: str, raw_key: str) -> Alias | None:
    """The canonical meaning of a key, or None. Evaluation metrics (`eval_...`) never mean a training metric."""
    if raw_key.startswith(("eval_", "eval/")):
        return None
    alias = ALIASES.get(framework, {}).get(raw_key)
    if alias is not None:
        return alias
    for pattern, candidate in _PATTERNS.get(framework, ()):
        if pattern.fullmatch(raw_key):
            return candidate
    return None


def canonicalize(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Fill `metric` and `estimator` of `signals` columns from `framework` and `raw_key`.

    Rows that carry a metric already keep it. Unmapped keys get an empty metric. KeyError when `raw_key` is absent.
    """
    keys = columns["raw_key"]
    frameworks = columns.get("framework", [""] * len(keys))
    given_metrics = columns.get("metric", [""] * len(keys))
    given_estimators = columns.get("estimator", [""] * len(keys))
    metrics: list[str] = []
    estimators: list[str] = []
    for framework, key, metric, estimator in zip(frameworks, keys, given_metrics, given_estimators, strict=True):
        alias = None if metric else resolve(framework or "", key)
        metrics.append(alias.metric if alias else metric or "")
        estimators.append(alias.estimator if alias else estimator or "")
    return {**columns, "metric": metrics, "estimator": estimators}
