"""Ratios from sums of real tensors, against published numbers and identities."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from mxprobe.attribution.gaussian import gaussian_reference
from mxprobe.attribution.intervals import gain_of, t_quantile
from mxprobe.attribution.ratios import output_ratios, realised_ratios, tensor_ratios, totals
from mxprobe_kernels import decompose
from mxprobe_kernels.formats import Rule
from tests.synthetic import operand_rows


def sums_of(x: np.ndarray, rule: str = "rceil") -> dict[str, float]:
    return decompose(torch.from_numpy(x), rule=rule).to_dict()


@pytest.mark.parametrize(
    ("draw", "scale", "deadzone", "grid", "cross"),
    [
        ("standard_normal", 1.753115, 0.020590, 0.740788, -1.514494),
        ("laplace", 1.567208, 0.051973, 0.545732, -1.164914),
    ],
)
def test_raw_ratios_of_the_golden_tensors(draw: str, scale: float, deadzone: float, grid: float, cross: float) -> None:
    x = getattr(np.random.default_rng(0), draw)(size=(4096, 32)).astype(np.float32)
    ratios = tensor_ratios(sums_of(x)).iloc[0]
    assert ratios["raw_scale"] == pytest.approx(scale, abs=2e-5)
    assert ratios["raw_deadzone"] == pytest.approx(deadzone, abs=2e-5)
    assert ratios["raw_grid"] == pytest.approx(grid, abs=2e-5)
    assert ratios["raw_cross"] == pytest.approx(cross, abs=2e-5)
    assert ratios["cos_scale_grid"] == pytest.approx(cross / 2 / math.sqrt(scale * grid), abs=1e-4)


@pytest.mark.parametrize("rule", [rule.value for rule in Rule])
def test_splits_sum_to_one_under_every_rule(rule: str) -> None:
    x = np.random.default_rng(1).laplace(size=(64, 96)).astype(np.float32)
    ratios = tensor_ratios(sums_of(x, rule)).iloc[0]
    assert ratios["scale"] + ratios["deadzone"] + ratios["grid"] == pytest.approx(1.0)
    assert ratios["on_d"] + ratios["off_d"] == pytest.approx(1.0)
    assert ratios["zeroed"] + ratios["saturated"] + ratios["rest"] == pytest.approx(1.0)
    assert ratios["rest"] >= 0
    assert ratios["identity_gap"] < 1e-6  # backends may accumulate in float32; the trace allows 1e-5


def test_a_power_of_two_that_beats_the_ideal_scale_keeps_its_sign() -> None:
    on_grid = torch.tensor([[4.0, 3.0, 1.0, -0.5] * 8])  # rceil takes s = 1 and is exact; s* = 4/6 is not
    noisy = on_grid * (1 + 1e-3 * torch.randn(1, 32, generator=torch.Generator().manual_seed(0)))
    ratios = tensor_ratios(decompose(noisy).to_dict()).iloc[0]
    assert ratios["scale"] < -1.0


def test_sums_first_then_divide() -> None:
    """Layers of very different size: the ratio of the whole is not the mean of the ratios."""
    rng = np.random.default_rng(2)
    parts = [rng.standard_normal((8, 64)) * 100, rng.laplace(size=(8, 64))]
    rows = [sums_of(part.astype(np.float32)) for part in parts]
    frame = pd.DataFrame([{"module": "m", **row} for row in rows])
    together = tensor_ratios(totals(frame, ["module"])).iloc[0]
    whole = tensor_ratios(sums_of(np.concatenate(parts).astype(np.float32))).iloc[0]
    for name in ("nmse", "scale", "deadzone", "zero_frac", "gain"):
        assert together[name] == pytest.approx(whole[name], rel=1e-6)  # what a backend promises of a sum
    mean = tensor_ratios(frame)["nmse"].mean()
    assert together["nmse"] != pytest.approx(mean, rel=0.01)


def test_totals_of_nothing_are_missing_not_zero() -> None:
    frame = pd.DataFrame({"module": ["a", "a"], "sum_e2": [1.0, 2.0], "out_e2": [np.nan, np.nan], "amax": [1.0, 3.0]})
    done = totals(frame, ["module"]).iloc[0]
    assert done["sum_e2"] == 3.0
    assert math.isnan(done["out_e2"])
    assert done["amax"] == 3.0


def test_an_all_zero_tensor_gives_no_number() -> None:
    ratios = tensor_ratios(decompose(torch.zeros(2, 64)).to_dict()).iloc[0]
    for name in ("nmse", "sqnr_db", "scale", "zeroed", "gain"):
        assert math.isnan(ratios[name])
    assert ratios["zero_frac"] == 0.0


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_output_splits_sum_to_one(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(32, 64, generator=generator), torch.randn(64, 16, generator=generator)
    row, _ = operand_rows(x, w, rule=rule)
    ratios = output_ratios(row).iloc[0]
    assert ratios["out_scale"] + ratios["out_deadzone"] + ratios["out_grid"] == pytest.approx(1.0)
    assert ratios["out_error"] == pytest.approx(0.0133, rel=0.2)
    assert (ratios["out_saturated"] > 0) == (rule == "floor")


def test_an_outlier_channel_hides_in_the_tensor_and_shows_in_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(256, 64, generator=generator), torch.randn(64, 64, generator=generator)
    channels = torch.ones(64)
    channels[5::32] = 32.0
    plain, _ = operand_rows(x, w.T.contiguous().T)
    outlier, _ = operand_rows(x * channels, w / channels[:, None])
    before, after = tensor_ratios(plain).iloc[0], tensor_ratios(outlier).iloc[0]
    assert after["zero_frac"] > 0.5
    assert after["nmse"] < 2 * before["nmse"]
    assert output_ratios(outlier)["out_error"].iloc[0] > 10 * output_ratios(plain)["out_error"].iloc[0]
    assert output_ratios(outlier)["out_zeroed"].iloc[0] > 0.5


def test_realised_against_predicted() -> None:
    frame = pd.DataFrame(
        {
            "module": ["a", "a", "none", "lost"],
            "ref2": [1.0, 3.0, 1.0, 1.0],
            "realised2": [0.1, 0.3, 0.0, 0.5],
            "predicted2": [0.05, 0.15, 0.0, 0.0],
            "residual2": [0.0, 0.0, 0.0, 0.5],
        }
    )
    done = realised_ratios(frame, ["module"]).set_index("module")
    assert done.loc["a", "realised"] == pytest.approx(0.1)
    assert done.loc["a", "log2_ratio"] == pytest.approx(1.0)
    assert math.isnan(done.loc["none", "log2_ratio"])
    assert done.loc["lost", "log2_ratio"] == math.inf


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("log2_rms", [0.0, 0.4, -3.3])
def test_gaussian_reference_is_what_a_gaussian_gives(rule: Rule, log2_rms: float) -> None:
    x = np.random.default_rng(3).standard_normal((8192, 32)) * 2.0**log2_rms
    measured = tensor_ratios(sums_of(x.astype(np.float32), rule.value)).iloc[0]
    reference = gaussian_reference(log2_rms, rule)
    few = 0.03 if rule is Rule.FLOOR_DIV else 0.01  # there, few clipped elements make most of the error
    assert reference.nmse == pytest.approx(measured["nmse"], rel=few)
    assert reference.scale == pytest.approx(measured["scale"], abs=0.01)
    assert reference.deadzone == pytest.approx(measured["deadzone"], abs=0.002)
    assert reference.zero_frac == pytest.approx(measured["zero_frac"], abs=0.002)
    assert reference.deadzone_frac == pytest.approx(measured["deadzone_frac"], abs=0.002)
    assert reference.saturated_frac == pytest.approx(measured["saturated_frac"], abs=0.002)


def test_gaussian_reference_over_an_octave() -> None:
    octave = [gaussian_reference(phase / 64) for phase in range(64)]
    assert gaussian_reference(0.0).sqnr_db == pytest.approx(18.76, abs=0.01)
    assert gaussian_reference(0.0).zero_frac == pytest.approx(0.107, abs=0.0005)
    assert 0.0132 < min(r.nmse for r in octave) < max(r.nmse for r in octave) < 0.0142
    assert 0.225 < min(r.scale for r in octave) < max(r.scale for r in octave) < 0.28
    assert gaussian_reference(5.0) == gaussian_reference(-7.0)
    assert math.isnan(gaussian_reference(-math.inf).nmse)


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (7, 2.36462), (20, 2.08596), (1e6, 1.95996)],
)
def test_t_quantiles(degrees: float, value: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(value, rel=2e-3)


def test_gain_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(2000):
        before = rng.gamma(5.0, size=8)
        after = before * 0.4 + rng.normal(0.0, 0.05, size=8) * before
        gain = gain_of(after, before, np.ones(8))
        hits += gain.low <= 0.6 <= gain.high
    assert 0.92 < hits / 2000 < 0.98


def test_gain_with_little_data() -> None:
    alone = gain_of(np.array([0.2]), np.array([1.0]), np.ones(1))
    assert alone.value == pytest.approx(0.8)
    assert alone.low == -math.inf
    nothing = gain_of(np.zeros(3), np.zeros(3), np.ones(3))
    assert math.isnan(nothing.value)
    assert nothing.n == 0


def test_gain_weights_count_clusters() -> None:
    before, after = np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.5, 2.0])
    twice = gain_of(np.repeat(after, 2), np.repeat(before, 2), np.ones(6))
    weighted = gain_of(after, before, np.full(3, 2.0))
    assert (weighted.value, weighted.low, weighted.n) == pytest.approx((twice.value, twice.low, twice.n))
