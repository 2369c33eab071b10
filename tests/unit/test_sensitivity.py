"""Delta2 against the truth: the same microbatch run again with one operand's error put in."""

from __future__ import annotations

import signal
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.replay.arms import FORWARD_ROLES, replay_arms
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.measuring.replay.sensitivity import COMPONENTS, Sensitivity, measure_sensitivity
from tests import small_lm

HELD_OUT = 10**6
"""Seeds of text the model was not trained on."""


def measure(ids: torch.Tensor, **options: Any) -> Sensitivity:
    model = small_lm.trained()
    return measure_sensitivity(capture(model, (ids,), {}), small_lm.linears(model), **options)


def delta2(rows: list[dict[str, Any]], component: str = "total") -> dict[tuple[str, str], float]:
    """Delta2 per operand, averaged over probes."""
    chosen = [row for row in rows if row["component"] == component]
    n_probes = len({row["probe"] for row in chosen})
    found: dict[tuple[str, str], float] = {}
    for row in chosen:
        key = (row["module"], row["role"])
        found[key] = found.get(key, 0.0) + row["sum_delta2"] / row["n_tokens"] / n_probes
    return found


@cache
def truth() -> dict[tuple[str, str], dict[str, float]]:
    """Per operand: KL, shifts of log p and of entropy, with that operand alone rounded."""
    model = small_lm.trained()
    call, modules = capture(model, (small_lm.batch(48, HELD_OUT),), {}), small_lm.linears(model)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name in modules:
        for role in FORWARD_ROLES:
            (arm,) = replay_arms(call, modules, ("q",), only={(name, role)})
            row = arm.row()
            found[name, role.value] = {key: row[key] / row["n_tokens"] for key in row if key.startswith("sum_")}
    return found


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(np.array(values))) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_it_orders_all_forward_operands_by_their_true_kl():
    rows: list[dict[str, Any]] = []
    for microbatch in range(8):
        ids = small_lm.batch(48, HELD_OUT + microbatch)
        rows += [{**row, "probe": microbatch} for row in measure(ids, seed=microbatch, max_rows=48 * 24).rows()]
    predicted, true = delta2(rows), truth()
    assert len(true) == 56
    kl = [true[key]["sum_kl"] for key in true]
    half = [predicted[key] / 2 for key in true]
    assert spearman(half, kl) >= 0.95
    ratio = np.array(half) / np.array(kl)
    assert 0.8 < np.median(ratio) < 1.25
    assert np.quantile(ratio, 0.1) > 0.6
    assert np.quantile(ratio, 0.9) < 1.7


def test_four_probes_predict_the_kl_of_the_microbatch_itself():
    rows = list(measure(small_lm.batch(48, HELD_OUT), n_probes=4, max_rows=48 * 24).rows())
    predicted, true = delta2(rows), truth()
    assert spearman([predicted[k] for k in true], [true[k]["sum_kl"] for k in true]) >= 0.95
    assert 0.85 < np.median([predicted[k] / 2 / true[k]["sum_kl"] for k in true]) < 1.2


def test_signed_shifts_follow_the_true_ones():
    rows = [
        row for row in measure(small_lm.batch(48, HELD_OUT), max_rows=48 * 24).rows() if row["component"] == "total"
    ]
    shifts = {(row["module"], row["role"]): row for row in rows}
    true = truth()
    for name in ("sum_log_prob_shift", "sum_entropy_shift"):
        predicted = [shifts[key][name] / shifts[key]["n_tokens"] for key in true]
        assert spearman(predicted, [true[key][name] for key in true]) >= 0.85, name


def test_signed_shifts_of_components_add_up():
    rows = list(measure(small_lm.batch(8, HELD_OUT)).rows())
    shifts = {(row["module"], row["role"], row["component"]): row["sum_entropy_shift"] for row in rows}
    assert {component for _, _, component in shifts} == set(COMPONENTS)
    for module, role, component in shifts:
        if component == "total":
            parts = sum(shifts[module, role, part] for part in COMPONENTS[1:])
            assert parts == pytest.approx(shifts[module, role, "total"], rel=1e-3, abs=1e-5)


class OneLayer(nn.Module):
    """Linear in its weight and without any other layer, so that Delta2's products can be written down."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.x = nn.Buffer(torch.randn(5, 7, 64, generator=generator))
        self.linear = nn.Linear(64, 16)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(16, 64, generator=generator) * 0.1)

    def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(self.x[index])
        return {"log_probs": torch.log_softmax(logits, -1)[..., 0]}


def test_it_is_the_sum_over_samples_of_the_squared_first_order_shift():
    model = OneLayer()
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(4)) < 0.6
    call = capture(model, (torch.arange(5),), {})
    rows = list(measure_sensitivity(call, {"linear": model.linear}, mask=mask, seed=9).rows())
    by_operand = {(row["role"], row["component"]): row for row in rows}

    generator = torch.Generator().manual_seed(9)
    torch.randperm(5, generator=generator)
    signs = torch.randint(0, 2, (5, 7), generator=generator) * 2.0 - 1.0
    w = model.linear.weight.detach()
    logits = (model.x @ w.T + model.linear.bias).requires_grad_()
    objective = (signs * mask * torch.log_softmax(logits, -1)[..., 0]).sum()
    (g,) = torch.autograd.grad(objective, logits)
    fx, fw = mxprobe_kernels.error_fields(model.x), mxprobe_kernels.error_fields(w)
    for role, outputs in (
        ("x_fwd", {"total": fx.e @ w.T.double(), "deadzone": fx.e_dz @ w.T.double()}),
        ("w_fwd", {"total": model.x.double() @ fw.e.T, "scale": model.x.double() @ fw.e_scale.T}),
    ):
        for component, out in outputs.items():
            delta = (g.double() * out).sum((1, 2))
            row = by_operand[role, component]
            assert row["sum_delta2"] == pytest.approx(float(delta.square().sum()), rel=1e-4)
            assert row["n_tokens"] == int(mask.sum())
            assert row["n_samples"] == 5


def test_predicted_gains_of_corrections_are_those_of_replays():
    model = small_lm.trained()
    modules = small_lm.linears(model)
    corrections = (
        "rule:floor",
        "rule:even",
        "rule:ceil",
        "rule:oas",
        "mbs:32",
        "mbs:64",
        "mbs:128",
        "of:0.25",
        "of:0.5",
    )
    corrections += ("of:0.75", "of:1.0", "had:16", "had:32", "nvfp4", "mxfp8", "keep_high_precision")
    predicted = dict.fromkeys(("total", *corrections), 0.0)
    replayed = dict.fromkeys(("q", *corrections), 0.0)
    for microbatch in range(2):
        call = capture(model, (small_lm.batch(32, HELD_OUT + microbatch),), {})
        found = measure_sensitivity(call, modules, corrections=corrections, n_probes=2, seed=microbatch)
        for row in found.rows():
            if row["component"] in predicted:
                predicted[row["component"]] += row["sum_delta2"]
        for arm in replay_arms(call, modules, list(replayed)):
            replayed[arm.name] += arm.row()["sum_kl"]
    errors = [
        np.clip(1 - predicted[name] / predicted["total"], -1, 1) - np.clip(1 - replayed[name] / replayed["q"], -1, 1)
        for name in corrections
    ]
    assert len(errors) >= 15
    assert np.mean(np.abs(errors)) <= 0.10, dict(zip(corrections, np.round(errors, 2), strict=True))


def test_an_unknown_correction_is_said():
    with pytest.raises(ValueError, match="unknown correction 'off'"):
        measure(small_lm.batch(2, HELD_OUT), corrections=("off",))


def test_rows_in_no_known_order_make_one_sample():
    class Flat(OneLayer):
        def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.linear(self.x[index].flatten(0, 1)).unflatten(0, (5, 7))
            return {"logits": logits}

    model = Flat()
    call = capture(model, (torch.arange(5),), {})
    rows = list(measure_sensitivity(call, {"linear": model.linear}).rows())
    assert {row["n_samples"] for row in rows} == {1}
    assert all(np.isnan(row["sum_log_prob_shift"]) for row in rows), "no input_ids: the run's tokens are not known"


def test_samples_beyond_the_limit_of_rows_are_left_out():
    sensitivity = measure(small_lm.batch(16, HELD_OUT), max_rows=5 * 24)
    assert set(sensitivity.n_samples) == {5}
    assert float(sensitivity.n_tokens) == 5 * 24


def test_only_as_many_samples_as_are_measured_are_replayed():
    """The same sums as of a batch of these samples alone, and one forward of that size."""
    seen: list[int] = []

    class Watched(small_lm.SmallLM):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            seen.append(len(input_ids))
            return super().forward(input_ids)

    torch.manual_seed(0)
    model = Watched(n_layers=1)
    ids, mask = small_lm.batch(10, 0), torch.rand(10, 24) < 0.5
    call, modules = capture(model, (ids,), {}), small_lm.linears(model)
    few = list(measure_sensitivity(call, modules, mask=mask, max_rows=72, seed=3).rows())
    kept = torch.randperm(10, generator=torch.Generator().manual_seed(3))[:3].sort().values
    alone = capture(model, (ids[kept],), {})
    assert few == list(measure_sensitivity(alone, modules, mask=mask[kept], max_rows=72, seed=3).rows())
    assert seen == [3, 3]


@pytest.mark.parametrize("why", ["dropout", "shape"])
def test_a_batch_that_cannot_be_cut_is_replayed_whole(why: str):
    seen: list[int] = []

    class Awkward(small_lm.SmallLM):
        def __init__(self) -> None:
            super().__init__(n_layers=1)
            self.drop = nn.Dropout(0.1) if why == "dropout" else nn.Identity()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            seen.append(len(input_ids))
            if why == "shape" and len(input_ids) != 10:
                raise ValueError("ten, or nothing")
            return self.drop(super().forward(input_ids))

    torch.manual_seed(0)
    model = Awkward()
    call = capture(model, (small_lm.batch(10, 0),), {})
    found = measure_sensitivity(call, small_lm.linears(model), max_rows=72)
    assert seen == ([10] if why == "dropout" else [3, 10])
    assert set(found.n_samples) == {3}
    seen.clear()
    measure_sensitivity(call, small_lm.linears(model), max_rows=72)
    assert seen == [10]  # what was found out is known


@pytest.mark.parametrize("why", ["memory", "signal"])
def test_no_larger_batch_is_tried_where_it_was_not_for_the_cut(why: str):
    seen: list[int] = []

    class TooLateError(Exception):
        pass

    class Failing(small_lm.SmallLM):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            seen.append(len(input_ids))
            if why == "memory":
                raise torch.cuda.OutOfMemoryError
            signal.raise_signal(signal.SIGUSR1)
            return super().forward(input_ids)

    def handler(number: int, frame: Any) -> None:
        raise TooLateError

    model = Failing(n_layers=1)
    call = capture(model, (small_lm.batch(10, 0),), {})
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((TooLateError, torch.cuda.OutOfMemoryError)):
            measure_sensitivity(call, small_lm.linears(model), max_rows=72)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [3]


def test_modules_take_turns_where_outputs_are_too_large():
    one_output = 16 * 24 * 64 * 4
    sensitivity = measure(small_lm.batch(16, HELD_OUT), max_output_bytes=3 * one_output)
    measured = {name for name, _ in sensitivity.operands}
    modules = set(small_lm.linears(small_lm.trained()))
    assert measured
    assert measured | sensitivity.skipped == modules
    assert not measured & sensitivity.skipped
    rest = measure(small_lm.batch(16, HELD_OUT), record=sensitivity.skipped)
    assert {name for name, _ in rest.operands} == set(sensitivity.skipped)


def test_the_same_numbers_whichever_modules_are_recorded():
    ids = small_lm.batch(8, HELD_OUT)
    alone = delta2(list(measure(ids, record={"layers.1.up"}).rows()))
    together = delta2(list(measure(ids).rows()))
    assert set(alone) == {("layers.1.up", "x_fwd"), ("layers.1.up", "w_fwd")}
    for key, value in alone.items():
        assert value == pytest.approx(together[key], rel=1e-4)


def test_no_gradient_is_left_and_the_global_random_state_is_untouched():
    model = small_lm.trained()
    before = torch.get_rng_state()
    measure(small_lm.batch(4, HELD_OUT))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_a_shared_linear_counts_both_of_its_calls():
    class Twice(OneLayer):
        def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.x[index]
            return {"logits": self.linear(x) + self.linear(2 * x)}

    twice = Twice()
    nn.init.zeros_(twice.linear.bias)
    call = capture(twice, (torch.arange(5),), {})
    rows = {(r["role"], r["component"]): r for r in measure_sensitivity(call, {"linear": twice.linear}).rows()}

    class Triple(OneLayer):
        def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": 3 * self.linear(self.x[index])}

    triple = Triple()
    nn.init.zeros_(triple.linear.bias)
    call = capture(triple, (torch.arange(5),), {})
    expected = {(r["role"], r["component"]): r for r in measure_sensitivity(call, {"linear": triple.linear}).rows()}
    key = ("w_fwd", "total")
    assert rows[key]["sum_delta2"] == pytest.approx(expected[key]["sum_delta2"], rel=1e-3)


def test_a_model_that_returns_no_policy_is_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(NotReplayableError, match="neither logits"):
        measure_sensitivity(capture(model, (torch.ones(2, 8),), {}), {"0": model[0]})  # type: ignore[dict-item]
