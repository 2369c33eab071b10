"""The verdict on runs of the trained small language model with a planted fault, the answer known from the plant."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mxprobe_kernels
from mxprobe.attribution import Recommendation, Thresholds, recommend
from mxprobe.schema import Component, Verdict
from mxprobe.trace import open_trace
from tests import planted_lm
from tests.planted_lm import ACTS, EXTENTS, KINDS, is_right, mxfp4, names_a_wrong_component, write_planted

QUICK = Thresholds().replace(n_resamples=20)


def judge(directory: Path, kind: str, extent: str, seed: int) -> tuple[Recommendation, set[str]]:
    trace, planted = write_planted(directory, kind, extent=extent, seed=seed)
    return recommend(open_trace(trace), QUICK), planted


def test_a_fault_in_half_of_the_layers_is_named_there(tmp_path: Path):
    answer, planted = judge(tmp_path / "t", "grid", "half", seed=11)
    assert is_right("grid", answer, planted), answer.headline


@pytest.mark.slow
def test_planted_runs_are_judged_right_in_95_of_100_and_no_component_is_named_wrongly(tmp_path: Path):
    """`MXPROBE_SEEDS=10` for a hundred runs, some seconds each."""
    wrong: list[str] = []
    n = 0
    for seed in range(int(os.environ.get("MXPROBE_SEEDS", "2"))):
        for kind in KINDS:
            for extent in EXTENTS:
                answer, planted = judge(tmp_path / f"{kind}-{extent}-{seed}", kind, extent, seed)
                n += 1
                assert not names_a_wrong_component(kind, answer), (kind, extent, seed, answer.headline)
                if not is_right(kind, answer, planted):
                    wrong.append(f"{kind}, {extent}, seed {seed}: {answer.headline}")
    assert len(wrong) <= 0.05 * n, wrong


def by_rule(rule: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda w: mxprobe_kernels.quantize_dequantize(w, rule=rule)[0]


def foreign(name: str, w: torch.Tensor) -> torch.Tensor:
    """Kernels that are not ours: torchao's, one with ties up, one that cuts off, one with the floor of a quotient."""
    if name == "torchao":
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        mode = ScaleCalculationMode.FLOOR
        return MXTensor.to_mx(w.contiguous(), torch.float4_e2m1fn_x2, scaling_mode=mode).dequantize(torch.float32)
    blocks = w.reshape(w.shape[0], -1, 32)
    exponent = torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 6.0)
    s = 2.0 ** (exponent.floor() if name == "floor_div" else exponent.ceil())
    z = (blocks / s).clamp(-6.0, 6.0)
    if name == "floor_div":
        return (planted_lm.nearest_code(z) * s).reshape(w.shape)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    if name == "truncated":
        return (torch.sign(z) * grid[torch.bucketize(z.abs(), grid, right=True) - 1] * s).reshape(w.shape)
    middles = (grid[1:] + grid[:-1]) / 2
    code = torch.bucketize(z.abs(), middles, right=True)  # half up
    return (torch.sign(z) * grid[code] * s).reshape(w.shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchao", "floor_div"])
def test_a_foreign_rule_on_one_side_is_a_rule_mismatch_and_no_scale_bias(name: str, tmp_path: Path):
    trace, _ = write_planted(tmp_path / "t", "natural", train=mxfp4, rollout=lambda w: foreign(name, w))
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict is Verdict.NOT_EXPLAINED
    assert answer.component is Component.NONE
    assert answer.chosen == ()
    assert answer.headline.startswith("Rule mismatch")
    assert "mxfp4+rceil" in answer.headline
    assert ("mxfp4+floor_div" if name == "floor_div" else "mxfp4+floor,") in answer.headline
    assert any(item.name == "rule_mismatch" and item.holds for item in answer.evidence)


@pytest.mark.slow
def test_half_up_ties_are_still_mxfp4_rounding(tmp_path: Path):
    """No recipe reproduces the outputs exactly, and the layers still do what MXFP4 rounding predicts."""
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert 0.001 < float((foreign("half_up", w) != mxfp4(w)).float().mean()) < 0.05
    trace, _ = write_planted(tmp_path / "t", "natural", rollout=lambda w: foreign("half_up", w))
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict in ACTS, answer.headline
    assert answer.component in (Component.GRID, Component.MIXED), answer.headline
    assert all(not name.startswith("mbs") for name in answer.chosen), answer.headline


@pytest.mark.slow
@pytest.mark.parametrize("extent", ["all", "half"])
def test_codes_that_are_cut_off_are_no_rounding(extent: str, tmp_path: Path):
    """Their error is as large as that of two rounded operands, which must not be taken for it."""
    cut = lambda w: foreign("truncated", w)  # noqa: E731
    trace, _ = write_planted(
        tmp_path / "t", "natural", extent=extent, rollout=cut, elsewhere=mxfp4, kind_elsewhere="natural"
    )
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict is Verdict.NOT_EXPLAINED, answer.headline
    assert answer.chosen == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeros", "truncated"])
def test_one_broken_layer_among_rounded_ones_is_named_and_gets_no_correction(name: str, tmp_path: Path):
    """Lost weights make most of the mismatch: not explained. Codes that are cut off do not: the others are noise."""
    broken = torch.zeros_like if name == "zeros" else lambda w: foreign(name, w)
    trace, (planted,) = write_planted(
        tmp_path / "t", "natural", extent="one", rollout=broken, elsewhere=mxfp4, kind_elsewhere="natural"
    )
    answer = recommend(open_trace(trace), QUICK)
    assert (answer.verdict is Verdict.NOT_EXPLAINED) == (name == "zeros"), answer.headline
    assert planted not in {module for group in answer.where for module in group.modules}
    (fact,) = [item for item in answer.evidence if item.name == "realised_over_predicted_rollout"]
    assert planted in fact.text


@pytest.mark.slow
def test_both_sides_by_one_foreign_rule_are_no_mismatch(tmp_path: Path):
    trace, _ = write_planted(tmp_path / "t", "natural", train=by_rule("floor"), rollout=by_rule("floor"))
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict is Verdict.NONE_NEEDED, answer.headline


@pytest.mark.slow
def test_a_scale_fault_in_the_gradients_alone_is_no_fault_of_the_forward(tmp_path: Path):
    trace, _ = write_planted(tmp_path / "t", "natural", train=mxfp4, gradient="scale")
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict is Verdict.NONE_NEEDED, answer.headline
    assert answer.component is not Component.SCALE, answer.headline
    assert answer.chosen == ()
    (fact,) = [item for item in answer.evidence if item.name == "backward"]
    assert "g_dgrad" in fact.text
    assert "no symptom" in fact.text


@pytest.mark.slow
def test_stale_weights_on_a_wrong_scale_are_never_named_anything_else(tmp_path: Path):
    """Two faults at once: the rollout keeps old weights, whose rounding is all scale bias."""
    trace, _ = write_planted(tmp_path / "t", "stale_scale", extent="half")
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict is Verdict.NOT_EXPLAINED or answer.component is Component.SCALE, answer.headline


@pytest.mark.slow
def test_scales_of_older_weights_are_not_explained_or_named_by_what_they_do(tmp_path: Path):
    """Codes of the current weights under block scales half as large in half of the blocks: these are cut off at 6."""
    rest = {"elsewhere": mxfp4, "kind_elsewhere": "natural"}
    trace, _ = write_planted(tmp_path / "t", "natural", extent="half", rollout=under_old_scales, **rest)
    answer = recommend(open_trace(trace), QUICK)
    assert answer.verdict is Verdict.NOT_EXPLAINED or answer.component is Component.SATURATION, answer.headline


def under_old_scales(w: torch.Tensor) -> torch.Tensor:
    blocks = w.reshape(w.shape[0], -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 6.0))
    grown = torch.rand(exponent.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    s = 2.0 ** (exponent - grown.float())
    return (planted_lm.nearest_code((blocks / s).clamp(-6.0, 6.0)) * s).reshape(w.shape)
