"""Canonical metric names, and which key of which framework means which of them.

Frameworks log the same quantity under different names, and different quantities under the same name; so each
alias names its estimator too. Keys that no alias covers stay in the trace with an empty `metric`.

A value that was NaN is a row with NaN; a value that was missing is no row. Reading that difference is up to whoever
reads: `isna` on rows, absence on steps.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxprobe.metric_aliases import ALIASES, LOGGERS, PATTERNS
from mxprobe.metric_aliases import ESTIMATORS as ESTIMATORS
from mxprobe.metric_aliases import Alias as Alias

OWN = "mxprobe"
"""`framework` of the rows that the agent measured itself."""


@dataclass(frozen=True)
class Metric:
    """A canonical training metric."""

    name: str
    unit: str
    """`nats`, `1` for pure numbers, `frac` for shares in [0, 1], `tokens`, `s`."""
    description: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("reward_mean", "1", "mean reward of the completions, all reward functions together"),
        Metric("reward_std", "1", "standard deviation of the reward over the completions"),
        Metric("reward_max", "1", "largest reward of a completion"),
        Metric("reward_min", "1", "smallest reward of a completion"),
        Metric("reward_group_std", "1", "standard deviation of the reward within a prompt's group, mean over groups"),
        Metric("reward_shaped_mean", "1", "mean reward as the advantage sees it: after penalties and normalization"),
        Metric("reward_function_mean", "1", "mean of one reward function; the raw key names it"),
        Metric("reward_function_std", "1", "standard deviation of one reward function; the raw key names it"),
        Metric("dead_groups", "frac", "prompt groups whose rewards are all equal: no advantage, no gradient"),
        Metric("dead_groups_count", "groups", "number of such groups"),
        Metric("groups_kept", "%", "prompt groups that dynamic filtering kept"),
        Metric("entropy", "nats", "policy entropy per generated token"),
        Metric("entropy_coef", "1", "weight of the entropy bonus"),
        Metric("kl_ref", "nats", "KL divergence of the policy to the reference model, per token"),
        Metric("kl_ref_max", "nats", "largest |KL| term of a sequence's tokens, mean over sequences"),
        Metric("kl_coef", "1", "weight of the KL term"),
        Metric("kl_update", "nats", "KL divergence of the policy over one update, per token"),
        Metric("update_ratio_mean", "1", "probability ratio of updated to old policy, mean"),
        Metric("update_ratio_min", "1", "probability ratio of updated to old policy, minimum"),
        Metric("update_ratio_max", "1", "probability ratio of updated to old policy, maximum"),
        Metric("mismatch_kl", "nats", "KL(rollout engine || trainer) per sampled token"),
        Metric("mismatch_kl_max", "nats", "the same, largest token"),
        Metric("mismatch_kl_reverse", "nats", "KL(trainer || rollout engine) per sampled token"),
        Metric("mismatch_kl_kept", "nats", "KL(rollout engine || trainer) of the tokens that took part in the update"),
        Metric("mismatch_kl_filtered", "nats", "KL(rollout engine || trainer) of the tokens that were masked out"),
        Metric("mismatch_js", "nats", "divergence of rollout engine and trainer, symmetric"),
        Metric("mismatch_chi2", "1", "chi-squared divergence of trainer from rollout engine"),
        Metric("mismatch_ess", "frac", "effective sample size of the importance weights"),
        Metric("mismatch_logp_abs_mean", "nats", "|log-probability by the rollout engine - by the trainer|, mean"),
        Metric("mismatch_logp_abs_max", "nats", "|log-probability by the rollout engine - by the trainer|, maximum"),
        Metric("mismatch_logp_abs_min", "nats", "|log-probability by the rollout engine - by the trainer|, minimum"),
        Metric("mismatch_logp_abs_std", "nats", "|log-probability by the rollout engine - by the trainer|, deviation"),
        Metric("mismatch_multiplicative", "1", "probability by one side over probability by the other, larger first"),
        Metric("mismatch_prob_diff_mean", "1", "|probability by the rollout engine - by the trainer|, mean"),
        Metric("mismatch_prob_diff_max", "1", "|probability by the rollout engine - by the trainer|, maximum"),
        Metric("mismatch_prob_diff_std", "1", "|probability by the rollout engine - by the trainer|, deviation"),
        Metric("mismatch_pearson", "1", "correlation of the probabilities by rollout engine and trainer"),
        Metric("mismatch_ratio_min", "1", "importance ratio of trainer to rollout engine, minimum"),
        Metric("mismatch_ratio_mean", "1", "importance ratio of trainer to rollout engine, mean"),
        Metric("mismatch_ratio_max", "1", "importance ratio of trainer to rollout engine, maximum"),
        Metric("mismatch_ratio_std", "1", "importance ratio of trainer to rollout engine, deviation"),
        Metric("mismatch_ratio_deviation", "1", "|importance ratio of trainer to rollout engine - 1|, mean"),
        Metric("mismatch_clipped", "frac", "tokens whose importance weight was cut off"),
        Metric("mismatch_false_clip", "frac", "tokens whose gradient the mismatch alone would clip away"),
        Metric("mismatch_filtered", "frac", "tokens or sequences masked out for their importance ratio"),
        Metric("mismatch_filtered_low", "frac", "tokens masked out for a low ratio"),
        Metric("mismatch_filtered_high", "frac", "tokens masked out for a high ratio"),
        Metric("clip_ratio", "frac", "tokens whose update was clipped, on either side"),
        Metric("clip_ratio_low", "frac", "tokens clipped on the low side"),
        Metric("clip_ratio_high", "frac", "tokens clipped on the high side"),
        Metric("clip_ratio_dual", "frac", "tokens of negative advantage at the second bound of dual clipping"),
        Metric("length_mean", "tokens", "completion length, mean"),
        Metric("length_min", "tokens", "completion length, minimum"),
        Metric("length_max", "tokens", "completion length, maximum"),
        Metric("length_padded", "tokens", "completion length that the batch is padded to"),
        Metric("length_terminated_mean", "tokens", "length of the completions that ended by themselves, mean"),
        Metric("length_terminated_min", "tokens", "length of the completions that ended by themselves, minimum"),
        Metric("length_terminated_max", "tokens", "length of the completions that ended by themselves, maximum"),
        Metric("truncated", "frac", "completions cut at the length limit"),
        Metric("grad_norm", "1", "global gradient norm before clipping"),
        Metric("loss", "1", "training loss"),
        Metric("policy_loss", "1", "policy part of the loss, without the entropy bonus"),
        Metric("router_aux_loss", "1", "load-balancing loss of a mixture of experts"),
        Metric("router_max_violation", "1", "load of the busiest expert over its fair share, less one"),
        Metric("router_confidence", "1", "probability that the router gives to the experts it chose"),
        Metric("learning_rate", "1", "learning rate of the first parameter group"),
        Metric("epoch", "1", "passes over the training data"),
        Metric("tokens_seen", "tokens", "input tokens seen since the start"),
        Metric("step_time", "s", "wall time of one training step"),
        Metric("train_runtime", "s", "wall time of the whole training, logged once at its end"),
    )
}

# `eval_loss`, `eval/...`, `eval-rollout/...`, `val-core/...`, `validation/...`: only where the key begins so, since a
# reward function may be called anything.
_EVALUATION = re.compile(r"(?:eval|evaluation|val|valid|validation|test)(?:[-_/].*)?", re.DOTALL)


def is_evaluation(raw_key: str) -> bool:
    """True for keys of evaluation: they never mean a training metric."""
    return _EVALUATION.fullmatch(raw_key) is not None


def resolve(framework: str, raw_key: str) -> Alias | None:
    """The canonical meaning of a key, or None; always None for keys of evaluation."""
    if is_evaluation(raw_key):
        return None
    alias = ALIASES.get(framework, {}).get(raw_key)
    if alias is not None:
        return alias
    for pattern, candidate in PATTERNS.get(framework, ()):
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


@dataclass(frozen=True)
class Series:
    """One line of a trace: what one sink logged under one key."""

    source: str
    framework: str
    raw_key: str


def preferred(series: Iterable[Series]) -> Series | None:
    """Of several series that mean the same metric, the one to show; None of none.

    Two keys of a framework may mean one metric by two estimators, and a script may write one number to two loggers:
    they are alternatives, not samples to be averaged. Frameworks come before loggers and those before measurements of
    our own, which sample; then the order of the aliases.
    """

    def rank(one: Series) -> tuple[int, int, str, str]:
        keys = list(ALIASES.get(one.framework, {}))
        position = keys.index(one.raw_key) if one.raw_key in keys else len(keys)
        kind = 2 if one.framework == OWN else int(one.framework in LOGGERS)
        return kind, position, one.source, one.raw_key

    return min(series, key=rank, default=None)


@dataclass(frozen=True)
class Caveat:
    """What a reader of a key must know, for versions of a framework up to and including `until`."""

    framework: str
    raw_key: str
    until: tuple[int, ...]
    text: str


CAVEATS: tuple[Caveat, ...] = (
    Caveat("verl", "actor/entropy", (0, 4, 0), "wrong under dynamic batching in verl up to 0.4.0 (JustRL issue 5)"),
)


def caveats(framework: str, version: str, raw_key: str) -> list[str]:
    """What is known to be wrong with this key in this version. An unreadable version counts as the newest."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return [
        caveat.text
        for caveat in CAVEATS
        if (caveat.framework, caveat.raw_key) == (framework, raw_key) and numbers and numbers <= caveat.until
    ]
