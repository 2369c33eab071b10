"""Which key of which framework means which metric, by which estimator.

Read from the sources of the versions named at each table. A key is listed only where its meaning is certain: one that
is not stays unmapped and visible. Within a table, of two keys for one metric the first is preferred.

d is the difference of the log-probabilities of a sampled token, first policy named less second.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ESTIMATORS: dict[str, str] = {
    "": "plain value",
    "k1": "mean d: unbiased, may be negative",
    "k1_negated": "mean -d: k1 with its sign turned",
    "k2": "mean d²/2",
    "k3": "mean exp(-d) - 1 + d: unbiased, never negative",
    "k3_clamped": "k3, each token clamped to [-10, 10]",
    "k3_by_default": "k3 unless the run's configuration names another",
    "configured": "the one that the run's configuration names",
    "abs_dlogp": "|d|",
    "abs_dlogp_in_update": "|d|, of the policy during the update",
    "exp_abs_dlogp": "exp |d|",
    "prob_diff": "|difference of probabilities|",
    "js": "Jensen-Shannon divergence",
    "full_vocab": "over the whole vocabulary, token mean",
    "full_vocab_in_update": "over the whole vocabulary, during the update",
    "sampled": "from the sampled tokens' log-probabilities",
    "per_token": "over tokens",
    "per_sequence": "over sequences",
    "non_aborted": "without aborted completions",
    "filtered": "after dynamic sampling",
    "rollout_statistics": "over the whole rollout batch",
    "mean_since_last_log": "mean since the last log",
    "one_value": "groups that agree on one reward value; the raw key names it",
}


@dataclass(frozen=True)
class Alias:
    """A framework's key for a canonical metric and the estimator behind it."""

    metric: str
    estimator: str = ""


Table = Mapping[str, Alias]


def _family(keys: str, metrics: str, statistics: str, estimator: str = "") -> Iterator[tuple[str, Alias]]:
    """`keys` and `metrics` are patterns with one `*` for each of the statistics."""
    for statistic in statistics.split():
        yield keys.replace("*", statistic), Alias(metrics.replace("*", statistic), estimator)


# transformers 5.24, `Trainer.log`.
_TRANSFORMERS: Table = {
    "loss": Alias("loss", "mean_since_last_log"),
    "grad_norm": Alias("grad_norm"),
    "learning_rate": Alias("learning_rate"),
    "epoch": Alias("epoch"),
    "num_input_tokens_seen": Alias("tokens_seen"),
    "train_runtime": Alias("train_runtime"),
}

# TRL 1.16, `GRPOTrainer.log`: means over the steps since the last log.
_TRL: Table = {
    **_TRANSFORMERS,
    "reward": Alias("reward_mean"),
    "reward_std": Alias("reward_std"),
    "frac_reward_zero_std": Alias("dead_groups"),
    "entropy": Alias("entropy", "full_vocab"),
    "entropy_coef": Alias("entropy_coef"),
    "kl": Alias("kl_ref", "k3"),
    **dict(_family("sampling/sampling_logp_difference/*", "mismatch_logp_abs_*", "mean max", "abs_dlogp")),
    **dict(_family("sampling/importance_sampling_ratio/*", "mismatch_ratio_*", "min mean max")),
    "clip_ratio/region_mean": Alias("clip_ratio", "per_token"),
    "clip_ratio/low_mean": Alias("clip_ratio_low", "per_token"),
    "clip_ratio/high_mean": Alias("clip_ratio_high", "per_token"),
    **dict(_family("completions/*_length", "length_*", "mean min max")),
    **dict(_family("completions/*_terminated_length", "length_terminated_*", "mean min max")),
    "completions/clipped_ratio": Alias("truncated"),
    "policy_loss": Alias("policy_loss"),
    "aux_loss": Alias("router_aux_loss"),
    "num_tokens": Alias("tokens_seen"),
    "step_time": Alias("step_time"),
}

# verl 0.9.1. `critic/score` is before, `critic/rewards` after the KL penalty; `actor/pg_clipfrac_lower` is the dual
# clip, not the low side of the clip.
_VERL: Table = {
    "critic/score/mean": Alias("reward_mean"),
    "critic/score/max": Alias("reward_max"),
    "critic/score/min": Alias("reward_min"),
    "critic/rewards/mean": Alias("reward_shaped_mean"),
    "actor/entropy": Alias("entropy", "full_vocab"),
    "actor/entropy_loss": Alias("entropy", "full_vocab_in_update"),
    "actor/kl_loss": Alias("kl_ref", "configured"),
    "actor/reward_kl_penalty": Alias("kl_ref", "configured"),
    "actor/kl_coef": Alias("kl_coef"),
    "actor/reward_kl_penalty_coeff": Alias("kl_coef"),
    "actor/ppo_kl": Alias("kl_update", "k1"),
    "rollout_corr/k3_kl": Alias("mismatch_kl", "k3"),
    "rollout_corr/kl": Alias("mismatch_kl", "k1"),
    "rollout_corr/chi2_token": Alias("mismatch_chi2", "per_token"),
    "rollout_corr/chi2_seq": Alias("mismatch_chi2", "per_sequence"),
    **dict(_family("rollout_corr/rollout_is_*", "mismatch_ratio_*", "mean std max min")),
    "rollout_corr/rollout_is_eff_sample_size": Alias("mismatch_ess"),
    **dict(_family("training/rollout_probs_diff_*", "mismatch_prob_diff_*", "mean max std", "prob_diff")),
    "training/rollout_actor_probs_pearson_corr": Alias("mismatch_pearson"),
    "actor/pg_clipfrac": Alias("clip_ratio", "per_token"),
    "actor/pg_clipfrac_lower": Alias("clip_ratio_dual", "per_token"),
    **dict(_family("response_length/*", "length_*", "mean max min")),
    "response_length/clip_ratio": Alias("truncated"),
    **dict(_family("response_length_non_aborted/*", "length_*", "mean max min", "non_aborted")),
    "response_length_non_aborted/clip_ratio": Alias("truncated", "non_aborted"),
    "actor/grad_norm": Alias("grad_norm"),
    "actor/pg_loss": Alias("policy_loss"),
    "actor/loss": Alias("loss"),
    "actor/lr": Alias("learning_rate"),
    "rollout/moe/max_vio/avg": Alias("router_max_violation"),
    "perf/time_per_step": Alias("step_time"),
    "timing_s/step": Alias("step_time"),
    "training/epoch": Alias("epoch"),
}

# OpenRLHF 0.11.2, with the `train/` of its loggers. `entropy_loss` is the entropy; `vllm_kl` is rollout against
# trainer, not the reference; `logprobs_diff` is k1 against the reference.
_OPENRLHF: Table = {
    "train/rollout/reward_mean": Alias("reward_mean", "rollout_statistics"),
    "train/reward": Alias("reward_mean"),
    "train/rollout/reward_std": Alias("reward_std", "rollout_statistics"),
    "train/group_reward_std": Alias("reward_group_std"),
    "train/dynamic_filtering_pass_rate": Alias("groups_kept"),
    "train/entropy_loss": Alias("entropy", "full_vocab"),
    "train/kl": Alias("kl_ref", "configured"),
    "train/logprobs_diff": Alias("kl_ref", "k1"),
    "train/ppo_kl": Alias("kl_update", "k1"),
    "train/vllm_kl": Alias("mismatch_kl", "k1"),
    "train/is_filter_ratio": Alias("mismatch_filtered"),
    "train/ppo_clip_ratio": Alias("clip_ratio", "per_token"),
    "train/rollout/response_length_mean": Alias("length_mean", "rollout_statistics"),
    "train/response_length": Alias("length_mean"),
    "train/rollout/truncated_rate": Alias("truncated"),
    "train/actor_grad_norm": Alias("grad_norm"),
    "train/policy_loss": Alias("policy_loss"),
    "train/actor_lr": Alias("learning_rate"),
    "train/timing/step_total": Alias("step_time"),
}

# NeMo-RL, autumn 2026. `kl_penalty` is logged with its coefficient divided out. `probs_ratio_clamped` is a mean of
# clamped ratios, not a share of clipped tokens: it has no canonical name.
_NEMO_RL: Table = {
    "train/reward": Alias("reward_mean"),
    "train/filtered_reward": Alias("reward_mean", "filtered"),
    "train/approx_entropy": Alias("entropy", "sampled"),
    "train/kl_penalty": Alias("kl_ref", "k3_by_default"),
    "train/probs_ratio": Alias("update_ratio_mean"),
    "train/probs_ratio_min": Alias("update_ratio_min"),
    "train/probs_ratio_max": Alias("update_ratio_max"),
    "train/gen_kl_error": Alias("mismatch_kl", "k3_by_default"),
    "train/policy_kl_error": Alias("mismatch_kl_reverse", "k3_by_default"),
    "train/js_divergence_error": Alias("mismatch_js", "js"),
    "train/token_mult_prob_error": Alias("mismatch_multiplicative", "exp_abs_dlogp"),
    "train/sampling_importance_ratio": Alias("mismatch_ratio_mean"),
    "train/is_oob_ratio": Alias("mismatch_filtered"),
    "train/mean_gen_tokens_per_sample": Alias("length_mean"),
    "train/truncation_rate": Alias("truncated"),
    "train/grad_norm": Alias("grad_norm"),
    "train/loss": Alias("loss"),
    "train/lr": Alias("learning_rate"),
    "timing/train/total_step_time": Alias("step_time"),
}

# slime. `rollout/rewards` is after group normalization. `ois` is the ratio of the update, `tis` of the mismatch.
_SLIME: Table = {
    "rollout/raw_reward": Alias("reward_mean"),
    "rollout/rewards": Alias("reward_shaped_mean"),
    "rollout/entropy": Alias("entropy", "full_vocab"),
    "train/entropy_loss": Alias("entropy", "full_vocab_in_update"),
    "train/kl_loss": Alias("kl_ref", "configured"),
    "train/ppo_kl": Alias("kl_update", "k1"),
    "train/ois": Alias("update_ratio_mean"),
    "train/train_rollout_logprob_abs_diff": Alias("mismatch_logp_abs_mean", "abs_dlogp"),
    "train/tis": Alias("mismatch_ratio_mean"),
    "train/tis_abs": Alias("mismatch_ratio_deviation"),
    "train/tis_clipfrac": Alias("mismatch_clipped"),
    "train/pg_clipfrac": Alias("clip_ratio", "per_token"),
    **dict(_family("rollout/response_len/*", "length_*", "mean min max")),
    "rollout/response_lengths": Alias("length_mean"),
    "rollout/truncated_ratio": Alias("truncated"),
    "rollout/truncated": Alias("truncated"),
    "train/grad_norm": Alias("grad_norm"),
    "train/loss": Alias("loss"),
    "train/pg_loss": Alias("policy_loss"),
    "train/lr-pg_0": Alias("learning_rate"),
    "perf/step_time": Alias("step_time"),
}

# miles: slime's keys and its own. `train/ess_ratio` is 1 where the update KL is 0, whatever the mismatch: unmapped.
_MILES: Table = {**_SLIME, "train/train_rollout_kl": Alias("mismatch_kl", "k3_clamped")}

# SkyRL 0.3. `policy/response_length` is the length that a batch is padded to.
_SKYRL: Table = {
    "reward/avg_raw_reward": Alias("reward_mean"),
    "loss/avg_final_rewards": Alias("reward_shaped_mean"),
    "reward/num_zero_variance_filtered": Alias("dead_groups_count"),
    "policy/policy_entropy": Alias("entropy", "full_vocab"),
    "policy/policy_kl": Alias("kl_ref", "configured"),
    "loss/avg_kl": Alias("kl_ref", "configured"),
    "loss/avg_kl_max": Alias("kl_ref_max", "configured"),
    "loss/kl_loss_coef": Alias("kl_coef"),
    **dict(_family("policy/rollout_train_logprobs_abs_diff_*", "mismatch_logp_abs_*", "mean std max min", "abs_dlogp")),
    **dict(
        _family(
            "policy/minibatch_rollout_logprobs_abs_diff_*",
            "mismatch_logp_abs_*",
            "mean std max min",
            "abs_dlogp_in_update",
        )
    ),
    **dict(_family("policy/loss_metrics/is_ratio_*", "mismatch_ratio_*", "mean std max min")),
    "policy/loss_metrics/tis_token_clip_high_ratio": Alias("mismatch_clipped"),
    "policy/loss_metrics/clip_ratio": Alias("clip_ratio", "per_token"),
    "generate/avg_num_tokens": Alias("length_mean"),
    "generate/min_num_tokens": Alias("length_min"),
    "generate/max_num_tokens": Alias("length_max"),
    "policy/response_length": Alias("length_padded"),
    "policy/grad_norm": Alias("grad_norm"),
    "policy/final_loss": Alias("loss"),
    "policy/policy_loss": Alias("policy_loss"),
    "policy/policy_lr": Alias("learning_rate"),
    "timing/step": Alias("step_time"),
    "trainer/epoch": Alias("epoch"),
}

# prime-rl, autumn 2026; trainer (entropy, mismatch) and orchestrator (reward) are two processes.
_PRIME_RL: Table = {
    "entropy/all/mean": Alias("entropy", "full_vocab"),
    "entropy/mean": Alias("entropy", "full_vocab"),
    "mismatch_kl/all/mean": Alias("mismatch_kl", "k3"),
    "mismatch_kl/mean": Alias("mismatch_kl", "k3"),
    "mismatch_kl/all/max": Alias("mismatch_kl_max", "k3"),
    "mismatch_kl/max": Alias("mismatch_kl_max", "k3"),
    "masked_mismatch_kl/mean": Alias("mismatch_kl_filtered", "k3"),
    "unmasked_mismatch_kl/mean": Alias("mismatch_kl_kept", "k3"),
    "is_masked/mean": Alias("mismatch_filtered", "per_token"),
    "is_masked_low/mean": Alias("mismatch_filtered_low", "per_token"),
    "is_masked_high/mean": Alias("mismatch_filtered_high", "per_token"),
    "optim/grad_norm": Alias("grad_norm"),
    "optim/lr": Alias("learning_rate"),
    "loss/mean": Alias("loss"),
    "max_vio/mean": Alias("router_max_violation"),
    "routing_confidence/mean": Alias("router_confidence"),
    "time/step": Alias("step_time"),
}

# Scripts of their own, through wandb, TensorBoard and the like: only names that leave no doubt.
_LOGGER: Table = {
    "reward": Alias("reward_mean"),
    "reward_mean": Alias("reward_mean"),
    "reward_std": Alias("reward_std"),
    "entropy": Alias("entropy"),
    "grad_norm": Alias("grad_norm"),
    "loss": Alias("loss"),
    "learning_rate": Alias("learning_rate"),
    "lr": Alias("learning_rate"),
}

LOGGERS = ("accelerate", "wandb", "tensorboard", "trackio", "mlflow", "swanlab")

ALIASES: dict[str, Table] = {
    "trl": _TRL,
    "transformers": _TRANSFORMERS,
    "verl": _VERL,
    "openrlhf": _OPENRLHF,
    "nemo-rl": _NEMO_RL,
    "slime": _SLIME,
    "miles": _MILES,
    "areal": {"rollout/reward": Alias("reward_mean")},
    "skyrl": _SKYRL,
    "prime-rl": _PRIME_RL,
    **{name: {**_LOGGER, **{f"train/{key}": alias for key, alias in _LOGGER.items()}} for name in LOGGERS},
}

Pattern = tuple[re.Pattern[str], Alias]


def _areal() -> Iterator[Pattern]:
    """AReaL 1.0.4: role, then `update`, then the name; approximations of the same names lie deeper.

    `kl_rewards` carries coefficient and sign of a penalty and `seq_len` counts the prompt: both unmapped.
    """
    update = r"(?:(?!\w*critic)[\w-]+/)?(?:update/)?"
    for name, alias in {
        "task_reward/avg": Alias("reward_mean"),
        "task_reward/max": Alias("reward_max"),
        "task_reward/min": Alias("reward_min"),
        "final_reward/avg": Alias("reward_shaped_mean"),
        "entropy/avg": Alias("entropy", "full_vocab_in_update"),
        "approx_kl/avg": Alias("kl_update", "k1_negated"),
        "importance_weight/avg": Alias("update_ratio_mean"),
        "importance_weight/min": Alias("update_ratio_min"),
        "importance_weight/max": Alias("update_ratio_max"),
        "behave_approx_kl/avg": Alias("mismatch_kl", "k1_negated"),
        "compute_logp/kl_div_direct/avg": Alias("mismatch_kl", "k1"),
        "compute_logp/kl_div_taylor/avg": Alias("mismatch_kl", "k2"),
        "compute_logp/kl_div_dual/avg": Alias("mismatch_kl", "k3"),
        "behave_imp_weight/avg": Alias("mismatch_ratio_mean"),
        "behave_imp_weight/min": Alias("mismatch_ratio_min"),
        "behave_imp_weight/max": Alias("mismatch_ratio_max"),
        "rs_filtered_fraction": Alias("mismatch_filtered"),
        "clip_ratio/avg": Alias("clip_ratio", "per_token"),
        "dual_clip_ratio/avg": Alias("clip_ratio_dual", "per_token"),
        "no_eos_ratios/avg": Alias("truncated"),
        "grad_norm": Alias("grad_norm"),
        "actor_loss/avg": Alias("policy_loss"),
        "lr": Alias("learning_rate"),
    }.items():
        yield re.compile(update + re.escape(name)), alias


def _prime_rl() -> Iterator[Pattern]:
    """The orchestrator's aggregates over all environments; one environment's are not the run's."""
    scope = r"(?:train/)?effective/all/(?:agent/)?"
    yield re.compile(scope + "reward/mean"), Alias("reward_mean")
    yield re.compile(scope + "reward/std"), Alias("reward_std")
    yield re.compile(scope + "is_truncated/mean"), Alias("truncated")
    yield re.compile(scope + "num_output_tokens/mean"), Alias("length_mean")


_DEAD_GROUPS: Pattern = (re.compile(r"rollout/zero_std/count_.+"), Alias("dead_groups_count", "one_value"))

PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "trl": (
        (re.compile(r"rewards/.+/mean"), Alias("reward_function_mean")),
        (re.compile(r"rewards/.+/std"), Alias("reward_function_std")),
    ),
    "slime": (_DEAD_GROUPS,),
    "miles": (_DEAD_GROUPS,),
    "areal": tuple(_areal()),
    "prime-rl": tuple(_prime_rl()),
}
