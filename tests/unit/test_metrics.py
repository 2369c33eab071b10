"""What each framework's keys mean: against a hand-written table of real keys, and the laws that any table obeys."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mxprobe.metrics
from mxprobe.measuring.tokens.mismatch import Pairs, rollout_rows, signal_values
from mxprobe.metrics import (
    ALIASES,
    LOGGERS,
    METRICS,
    PATTERNS,
    Alias,
    Series,
    canonicalize,
    is_evaluation,
    preferred,
    resolve,
)

REAL_KEYS: dict[str, dict[str, list[str] | None]] = json.loads(
    (Path(__file__).parents[1] / "golden/framework_keys.json").read_text()
)
FRAMEWORKS = ("trl", "verl", "openrlhf", "nemo-rl", "slime", "miles", "areal", "skyrl", "prime-rl")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_real_keys_mean_what_they_mean(framework: str) -> None:
    found = {key: resolve(framework, key) for key in REAL_KEYS[framework]}
    expected = {key: Alias(*meaning) if meaning else None for key, meaning in REAL_KEYS[framework].items()}
    assert found == expected


def test_every_alias_names_a_known_metric_and_estimator() -> None:
    every = [alias for table in ALIASES.values() for alias in table.values()]
    every += [alias for patterns in PATTERNS.values() for _, alias in patterns]
    tokens = Pairs(torch.zeros(1).double(), torch.zeros(1).double(), 1, advantage=torch.ones(1).double())
    own = {metric for row in rollout_rows(tokens) for _, metric, _, _ in signal_values(row)}
    described = tomllib.loads(Path(mxprobe.metrics.__file__).with_suffix(".toml").read_text())["estimators"]
    assert {alias.metric for alias in every} | own == set(METRICS)
    assert {alias.estimator for alias in every} == set(described)


@pytest.mark.parametrize("framework", sorted(ALIASES))
@pytest.mark.parametrize("prefix", ["eval_", "eval/", "val-core/", "validation/", "test/"])
def test_an_evaluation_key_never_means_a_training_metric(framework: str, prefix: str) -> None:
    assert all(resolve(framework, prefix + key) is None for key in ALIASES[framework])


@given(st.text())
def test_is_evaluation_looks_at_the_beginning_only(rest: str) -> None:
    assert is_evaluation("eval/" + rest)
    assert not is_evaluation("rewards/eval/" + rest)
    assert not is_evaluation("value" + rest)


def test_kl_of_three_kinds_stays_apart() -> None:
    kinds = {
        "reference": [("trl", "kl"), ("verl", "actor/kl_loss"), ("openrlhf", "train/kl"), ("slime", "train/kl_loss")],
        "update": [("verl", "actor/ppo_kl"), ("openrlhf", "train/ppo_kl"), ("miles", "train/ppo_kl")],
        "mismatch": [
            ("verl", "rollout_corr/kl"),
            ("openrlhf", "train/vllm_kl"),
            ("nemo-rl", "train/gen_kl_error"),
            ("miles", "train/train_rollout_kl"),
            ("prime-rl", "mismatch_kl/all/mean"),
        ],
    }
    expected = {"reference": "kl_ref", "update": "kl_update", "mismatch": "mismatch_kl"}
    for kind, keys in kinds.items():
        assert {getattr(resolve(*key), "metric", None) for key in keys} == {expected[kind]}


def test_a_key_means_nothing_in_another_framework() -> None:
    assert resolve("trl", "actor/entropy") is None
    assert resolve("wandb", "kl") is None  # a script's own: to which of the three?
    assert resolve("unheard-of", "reward") is None


def test_canonicalize_fills_what_is_empty_and_keeps_the_rest() -> None:
    columns = {
        "raw_key": ["actor/entropy_loss", "actor/entropy", "strange", "rollout_corr/kl"],
        "framework": ["verl"] * 4,
        "metric": ["", "entropy_measured", "", ""],
        "estimator": ["", "own", "", ""],
        "value": [0.4, 0.5, math.nan, -0.001],
    }
    filled = canonicalize(columns)
    assert filled["metric"] == ["entropy", "entropy_measured", "", "mismatch_kl"]
    assert filled["estimator"] == ["full_vocab_in_update", "own", "", "k1"]
    assert filled["value"] is columns["value"]
    assert filled["raw_key"] is columns["raw_key"]


def test_canonicalize_needs_the_raw_key() -> None:
    with pytest.raises(KeyError, match="raw_key"):
        canonicalize({"framework": ["trl"]})


def test_preferred_takes_one_series_for_one_metric() -> None:
    before = Series("verl.utils.tracking.Tracking.log", "verl", "actor/entropy")
    during = Series("verl.utils.tracking.Tracking.log", "verl", "actor/entropy_loss")
    logged = Series("wandb.sdk.wandb_run.Run.log", "wandb", "entropy")
    assert preferred([logged, during, before]) == before
    assert preferred([logged, during]) == during
    assert preferred([logged]) == logged
    assert preferred([]) is None


def test_preferred_does_not_depend_on_the_order() -> None:
    series = [Series(name, name, "loss") for name in LOGGERS]
    assert preferred(series) == preferred(reversed(series)) == Series("accelerate", "accelerate", "loss")
