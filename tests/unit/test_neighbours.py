"""What neighbouring papers measure, against its definition written out and on tensors with a known answer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import mxprobe_kernels
from mxprobe.attribution.neighbours import alignments, block_ratios, bucket_ratio, bucket_ratios
from mxprobe.attribution.tensor import judge_tensor
from mxprobe.measuring.operands.block_statistics import TOP_PERCENT, block_row, transposition_row
from mxprobe.measuring.operands.operand import Operand, measure_operand
from mxprobe.measuring.operands.weights import sample_weight
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role
from mxprobe.tables import TABLES
from mxprobe_kernels.recipe_grammar import CHANNEL_WHATIFS, Correction

PLACE = {"step": 1, "module": "up", "role": "x_fwd", "phase": "train"}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ratios(x: torch.Tensor) -> pd.Series:
    return block_ratios(pd.DataFrame([{**PLACE, **block_row(mxprobe_kernels.error_fields(x))}])).iloc[0]


def test_bucket_ratio_of_known_histograms():
    even = np.full(16, 10.0)
    even[0] = even[8] = 5.0  # +0 and -0 are one value
    assert bucket_ratio(even) == pytest.approx(1.0)
    assert bucket_ratio(np.eye(16)[3]) == 0.0
    assert bucket_ratio(np.eye(16)[3] + np.eye(16)[11]) == pytest.approx(1.0 / np.log2(15))
    assert np.isnan(bucket_ratio(np.zeros(16)))
    rows = pd.DataFrame([{**PLACE, "code_hist": list(np.eye(16)[3])}, {**PLACE, "code_hist": list(np.eye(16)[11])}])
    found = bucket_ratios(pd.concat([rows, rows.iloc[:1].assign(code_hist=None)]))
    assert found["bucket_ratio"].tolist() == pytest.approx([1.0 / np.log2(15)])  # added first


def test_block_statistics_against_their_definition():
    x = normal(8, 80)  # the last block of a row is short
    x[2, 32:64] = 0.0
    row = block_row(mxprobe_kernels.error_fields(x))
    assert {*row} | {"format", "rule", "placement", "sampled_frac", "n_clusters", "micro_step", "time_ns", *PLACE} == {
        name for name, _ in TABLES["blocks"]
    }
    q = mxprobe_kernels.quantize_dequantize(x)[0]
    crest, underflow = [], []
    for r in range(8):
        for start in (0, 32, 64):
            block, rounded = x[r, start : start + 32].double(), q[r, start : start + 32]
            if block.abs().max() > 0:
                crest.append(float(block.abs().max() / block.square().mean().sqrt()))
                underflow.append(float(((rounded == 0) & (block != 0)).double().mean()))
    assert row["n_blocks"] == len(crest) == 23
    assert row["sum_crest"] == pytest.approx(sum(crest))
    assert row["sum_underflow2"] == pytest.approx(float(np.square(underflow).sum()))
    assert row["sum_crest_underflow"] == pytest.approx(float(np.dot(crest, underflow)))
    assert ratios(x)["underflow_crest_corr"] == pytest.approx(float(np.corrcoef(crest, underflow)[0, 1]))
    per_channel = sorted((q.double() - x.double()).square().sum(0).tolist(), reverse=True)
    for k in TOP_PERCENT:
        assert row[f"sum_e2_top{k}"] == pytest.approx(sum(per_channel[: max(80 * k // 100, 1)]))
        per_row = (q.double() - x.double()).square().sort(1, descending=True).values
        assert row[f"sum_e2_sparse{k}"] == pytest.approx(float(per_row[:, : max(80 * k // 100, 1)].sum()))


def test_peaked_blocks_underflow_and_an_outlier_channel_holds_the_error():
    even, peaked = normal(64, 320), normal(64, 320)
    peaked[:, ::32] *= 30.0
    assert ratios(peaked)["underflow"] > 3 * ratios(even)["underflow"]
    assert ratios(peaked)["crest"] > 1.5 * ratios(even)["crest"]
    mixed = torch.cat((even, peaked))
    assert ratios(mixed)["underflow_crest_corr"] > 0.8
    coarse = normal(64, 320)
    coarse[:, :3] *= 100.0  # three channels in one block: most of the error is theirs, in one percent of the channels
    assert ratios(coarse)["coverage_1"] > 10 * ratios(even)["coverage_1"]
    tiny = ratios(even * 1e-30)
    assert tiny["crest"] == pytest.approx(ratios(even)["crest"])


def test_independent_errors_align_like_chance_and_aligned_ones_do_not():
    x, w = normal(256, 128), normal(96, 128, seed=1)
    aligned = mxprobe_kernels.error_fields(w).e.float()[:4].repeat(64, 1)  # inputs along the weights' own errors

    def found(x: torch.Tensor) -> dict[str, float]:
        rows = [
            {
                "step": 1,
                "module": "up",
                "phase": "train",
                "role": role.value,
                **measure_operand(operand, format="mxfp4", rule="rceil").row,
            }
            for role, operand in (
                (Role.X_FWD, Operand(Role.X_FWD, x[None], w.T[None], 1.0, len(x))),
                (Role.W_FWD, Operand(Role.W_FWD, w[None], x.T[None], 1.0, len(w))),
            )
        ]
        modules = pd.DataFrame({"module": ["up", "norm"], "shape": [[96, 128], [128]]})
        table = alignments(pd.DataFrame(rows), modules).set_index("role")["alignment"]
        e = mxprobe_kernels.error_fields(w).e
        product = float((e @ x.double().T).square().sum())
        expected = product * 128 / float(e.square().sum() * x.double().square().sum())
        assert table["w_fwd"] == pytest.approx(expected, rel=1e-6)
        return table.to_dict()

    assert found(x) == pytest.approx({"x_fwd": 1.0, "w_fwd": 1.0}, abs=0.1)
    assert found(aligned)["w_fwd"] > 1.15


def test_transposition_is_that_of_the_two_quantizations_where_both_were_measured():
    w = normal(96, 160) * torch.logspace(-1, 1, 96)[:, None]
    config = AgentConfig(max_features=64)
    torch.manual_seed(0)
    module = torch.nn.Linear(160, 96, bias=False)
    module.weight.data.copy_(w)
    sampled = sample_weight(module, max_features=64, seed=3)
    assert sampled is not None
    assert sampled.out_index is not None
    assert sampled.in_index is not None
    rows, columns = (
        mxprobe_kernels.error_fields(part, format=config.format, rule=config.rule)
        for part in (sampled.rows, sampled.columns.T)
    )
    row = transposition_row(rows, columns, sampled.out_index, sampled.in_index)
    by_row = mxprobe_kernels.quantize_dequantize(w)[0].double()
    by_column = mxprobe_kernels.quantize_dequantize(w.T.contiguous())[0].double().T
    tile = torch.meshgrid(sampled.out_index, sampled.in_index, indexing="ij")
    assert row["sum_transposed2"] == pytest.approx(float((by_row - by_column)[tile].square().sum()))
    assert row["sum_tile2"] == pytest.approx(float(w.double()[tile].square().sum()))
    frame = pd.DataFrame([{**PLACE, **block_row(columns), **row}])
    expected = float((by_row - by_column)[tile].norm() / w.double()[tile].norm())
    assert block_ratios(frame).iloc[0]["transposition"] == pytest.approx(expected)
    assert expected > 0.09  # rows of different size


def test_transposition_of_gaussian_weights_lies_where_the_science_page_says():
    for scale in (0.9, 1.0, 1.3):
        w = scale * normal(128, 128)
        rows, columns = (mxprobe_kernels.error_fields(part) for part in (w, w.T.contiguous()))
        row = transposition_row(rows, columns, None, None)
        assert 0.035 < (row["sum_transposed2"] / row["sum_tile2"]) ** 0.5 < 0.08


def second_pass(x: torch.Tensor, k: float) -> torch.Tensor:
    """The definition, written out: gather the k % of channels with most error, quantize their residual, add it."""
    q = mxprobe_kernels.quantize_dequantize(x)[0]
    residual = x - q
    worst = residual.double().square().sum(0).argsort(descending=True, stable=True)[: max(int(x.shape[1] * k / 100), 1)]
    at = worst.sort().values
    q[:, at] += mxprobe_kernels.quantize_dequantize(residual[:, at].contiguous())[0]
    return q


@pytest.mark.parametrize("k", [1.0, 5.0, 12.5, 100.0])
def test_a_second_pass_on_some_channels_against_its_definition(k: float):
    x = normal(64, 330) * torch.logspace(-1, 1, 330)
    found = mxprobe_kernels.apply_correction(x, f"channels:{k:g}")
    assert torch.equal(found, second_pass(x, k))
    assert torch.equal(mxprobe_kernels.apply_correction(x.T.contiguous(), f"channels:{k:g}", dim=0), found.T)
    x[3, 7] = float("nan")
    spoilt = mxprobe_kernels.apply_correction(x, f"channels:{k:g}")
    assert spoilt[3, :32].isnan().all()  # its block, and nothing else
    assert int(spoilt.isnan().sum()) == 32


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (1, 7), (5,)])
def test_a_second_pass_survives_odd_shapes(shape: tuple[int, ...]):
    for correction in CHANNEL_WHATIFS:
        assert mxprobe_kernels.apply_correction(torch.ones(shape), correction).shape == shape


@pytest.mark.parametrize("text", ["channels", "channels:0", "channels:-1", "channels:101", "channels:x"])
def test_a_wrong_share_of_channels_is_answered_in_words(text: str):
    with pytest.raises(ValueError, match="channels"):
        mxprobe_kernels.apply_correction(torch.ones(2, 32), text)


def test_a_second_pass_mends_what_coverage_promises_and_is_never_named():
    """Three channels of 320 hold nearly all of the error: 1 % of a GEMM removes it; on an even tensor it does not."""
    even, coarse = normal(64, 320), normal(64, 320)
    coarse[:, :3] *= 100.0
    measured = [
        measure_operand(Operand(Role.X_FWD, x[None], normal(1, 320, 16), 1.0, 64), format="mxfp4", rule="rceil")
        for x in (even, coarse)
    ]
    for x, one, rows in zip((even, coarse), measured, measure_corrections(measured, CHANNEL_WHATIFS), strict=True):
        for row in rows:
            k = Correction.parse(row["correction"]).parameter
            covered = ratios(x)[f"coverage_{k:g}"]
            assert row["sum_e2"] == pytest.approx(float((second_pass(x, float(k)) - x).double().square().sum()))
            gain = 1.0 - row["sum_e2"] / one.row["sum_e2"]
            assert 0.95 * covered < gain <= covered
        assert (gain > 0.9) == (x is coarse)
        after = {row["correction"]: row for row in rows}
        judged = judge_tensor(one.row, after)
        assert not any(name.startswith("channels:") for name in judged.chosen)
        costs = {score.correction: score.cost_gemm for score in judged.scores}
        assert costs["channels:5"] == pytest.approx(0.05)
