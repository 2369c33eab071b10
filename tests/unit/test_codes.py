"""Which version of the weights an engine used is told from its inputs and outputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import (
    MIN_WATCHED,
    WATCHED_BYTES,
    sample_watched,
    sample_weight,
    watched_features,
)
from mxprobe.measuring.recipes import Call, infer_recipe, quantize
from mxprobe.measuring.versions.weight_history import KEPT, Finding, WeightHistory, codes_word, copy_versions

BASE = 100
NAME = "layers.0.up"


class Trainer:
    """A Linear that is trained, and the weights of all its steps, as an engine might have kept them."""

    def __init__(self, out: int = 96, width: int = 64, *, bias: bool = False, relative_step: float = 0.02) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.module = nn.Linear(width, out, bias=bias)
        self.history = WeightHistory()
        self.weights: dict[int, torch.Tensor] = {}
        self.biases: dict[int, torch.Tensor | None] = {}
        self.step = 0
        self._relative_step = relative_step
        self._has_bias = bias

    def train(self, *, keep: bool = True) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                noise = torch.randn(parameter.shape, generator=self._generator)
                parameter.add_(noise * self._relative_step * parameter.abs().mean())
        self.step += 1
        self.weights[self.step] = self.module.weight.detach().clone()
        self.biases[self.step] = self.module.bias.detach().clone() if self._has_bias else None
        if keep:
            for copies in copy_versions(self.step, {NAME: self.module}):
                self.history.keep(copies)

    def judge(
        self, weight: torch.Tensor, recipe: str = "mxfp4+rceil", *, bias: torch.Tensor | None = None, **changes: Any
    ) -> Finding:
        """What is said of an engine that computes with `weight` under `recipe`."""
        x = torch.randn(48, self.module.in_features, generator=self._generator)
        y = quantize(x, recipe) @ quantize(weight, recipe).T
        y = y if bias is None else y + bias
        sample = sample_weight(self.module, max_features=512, seed=self.step)
        assert sample is not None
        values: dict[str, Any] = {
            "module": NAME,
            "phase": "rollout",
            "step": self.step,
            "micro_step": 0,
            "time_ns": 1,
            "n_rows": len(x),
            "row_index": None,
            "x": x,
            "y": y if sample.out_index is None else y[:, sample.out_index],
            "y_watched": y[:, sample.watched_index],
            "weight": sample,
            "with_operands": False,
            "with_weights": False,
        }
        snapshot = Snapshot(**{**values, **changes})
        without = snapshot.y if sample.bias is None else snapshot.y - sample.bias
        found, sums = infer_recipe(Call(snapshot.x, sample.rows, without, snapshot.y.dtype))
        return self.history.judge(snapshot, found, exact=sums["exact"])


def words(found: Finding) -> str:
    """Return what is told of a finding, in a run that had taken `BASE` steps before attach."""
    return "" if found.event is None else found.event.later(BASE).words


def trained(n: int = 6, **options: Any) -> Trainer:
    trainer = Trainer(**options)
    for _ in range(n):
        trainer.train()
    return trainer


RECIPES = ("none", "mxfp4+rceil", "mxfp4+floor", "mxfp4+of:0.5", "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_with_current_weights_is_current_and_no_event(recipe: str):
    trainer = trained()
    assert trainer.judge(trainer.module.weight.detach(), recipe) == Finding(0, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_three_steps_behind_is_named_with_step_and_lag(recipe: str):
    trainer = trained()
    found = trainer.judge(trainer.weights[3], recipe)
    assert found.weight_lag == 3
    assert words(found).startswith(f"{NAME} behind: rollout computes with the weights of step 103, 3 behind; codes ")
    assert codes_word(trainer.weights[3]) in words(found)
    assert codes_word(trainer.weights[6]) in words(found)


def test_a_change_of_state_is_told_once_and_so_is_its_end():
    trainer = trained()
    assert words(trainer.judge(trainer.weights[4]))
    trainer.train()
    assert trainer.judge(trainer.weights[4]) == Finding(3, None)
    assert words(trainer.judge(trainer.weights[7])) == (
        f"{NAME} current: rollout computes with the trainer's current weights"
    )


def test_a_bias_is_stale_with_its_weight():
    trainer = trained(bias=True)
    assert trainer.judge(trainer.weights[6], bias=trainer.biases[6]).weight_lag == 0
    assert trainer.judge(trainer.weights[2], bias=trainer.biases[2]).weight_lag == 4


def test_weights_that_stay_at_their_first_value_are_recognised_for_ever():
    trainer = trained(3 * KEPT)
    assert len(trainer.history.versions(NAME)) == KEPT + 1
    found = trainer.judge(trainer.weights[1])
    assert found.weight_lag == 3 * KEPT - 1
    assert "the first version seen since attach" in words(found)
    assert trainer.judge(trainer.weights[5]).weight_lag is None  # dropped long ago


def test_weights_from_before_attach_match_none_and_the_event_says_so():
    trainer = Trainer()
    for _ in range(4):
        trainer.train(keep=False)
    for _ in range(4):
        trainer.train()
    found = trainer.judge(trainer.weights[2])
    assert found.weight_lag is None
    assert words(found).startswith(
        f"{NAME} unknown: rollout matches none of the last 3 versions kept, steps 105 to 107"
    )
    assert "closest is step 105" in words(found)
    assert "from before attach" in words(found)


def test_a_layer_whose_rows_are_permuted_and_one_that_is_transposed():
    trainer = trained(out=64)
    current = trainer.weights[6]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    permuted = trainer.judge(current[order])
    assert permuted.weight_lag is None
    assert "their output features in another order" in words(permuted)
    trainer = trained(out=64)
    transposed = trainer.judge(trainer.weights[6].T.contiguous())
    assert transposed.weight_lag is None
    assert "the transpose of the current weights" in words(transposed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_steps_are_told_apart_where_the_dtype_allows(dtype: torch.dtype):
    """Two steps of 1e-5 change y by 1e-10 of its energy: far under the tolerance of `exact`."""
    trainer = trained(relative_step=1e-5)
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    y = (x.double() @ trainer.weights[4].double().T).to(dtype)
    found = trainer.judge(trainer.weights[4], "none", x=x, y=y, y_watched=y)
    assert found.weight_lag == (2 if dtype is torch.float32 else 0)


def test_wide_modules_are_watched_on_a_few_features_within_the_budget():
    trainer = trained(out=1500, width=1024)
    watched = sample_watched(trainer.module)
    assert watched is not None
    assert watched[0].shape == (WATCHED_BYTES // 4096, 1024)
    assert trainer.judge(trainer.weights[4]).weight_lag == 2
    assert len(watched_features(torch.empty(40, 1 << 20, device="meta"))) == MIN_WATCHED


def test_training_rows_ask_only_whether_the_module_uses_its_own_weight():
    trainer = trained()
    assert trainer.judge(trainer.weights[6], phase="train") == Finding(0, None)
    assert trainer.judge(trainer.weights[3], phase="train") == Finding(None, None)


def test_hashes_are_those_of_the_codes():
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    assert codes_word(w) == codes_word(w * 1.0001)  # no code changes
    assert codes_word(w) != codes_word(-w)
    q = quantize(w, "mxfp4+rceil")
    assert codes_word(w) == codes_word(q) == f"{int(mxprobe_kernels.code_hash(w)) % 2**64:016x}"


def test_copies_are_not_views():
    trainer = trained(1)
    kept = trainer.history.versions(NAME)[0].weight.clone()
    trainer.train(keep=False)
    assert torch.equal(trainer.history.versions(NAME)[0].weight, kept)
