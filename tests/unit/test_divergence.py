"""Where two ways of computing the same tokens part, and the floor below which that means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxprobe.attribution.layer_divergence import first_divergence as first_of_frame
from mxprobe.attribution.token_mismatch import LogProbs, measured_floor
from mxprobe.divergence import first_divergence, load, sketch
from mxprobe.errors import UsageError
from mxprobe.measuring.recipes import quantize
from mxprobe.measuring.replay.captured_call import capture
from mxprobe.measuring.replay.floor import measure_floor, recomposed
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.measuring.replay.residual_stream import blocks_of, difference, projected
from tests.small_lm import ALPHABET, SmallLM, linears

MX = "mxfp4+rceil"


def ids(seed: int = 0, batch: int = 6) -> torch.Tensor:
    return torch.randint(0, len(ALPHABET), (batch, 12), generator=torch.Generator().manual_seed(seed))


def model() -> SmallLM:
    torch.manual_seed(0)
    return SmallLM()


def quantized(net: SmallLM, blocks: tuple[int, ...]) -> SmallLM:
    for index in blocks:
        for module in net.layers[index].modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda m, a, y: F.linear(quantize(a[0], MX), quantize(m.weight, MX)).to(y.dtype)
                )
    return net


class SplitK(nn.Linear):
    """Sums in as many parts as a kernel chosen by the number of rows may: another batch, other last bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = 8 if x.shape[0] > 3 else 1
        products = [
            a @ w.T for a, w in zip(x.to(self.weight.dtype).chunk(parts, -1), self.weight.chunk(parts, -1), strict=True)
        ]
        return torch.stack(products).sum(0)


def test_the_sketch_keeps_lengths_and_is_the_same_everywhere():
    h = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0))
    ratio = projected(h).square().sum(-1) / h.double().square().sum(-1)
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(ratio.std()) == pytest.approx((2 / 32) ** 0.5, rel=0.1)
    assert torch.equal(projected(h), projected(h))
    assert projected(torch.eye(3)).sign()[0, :6].tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, 1.0]


def test_the_blocks_are_those_of_the_longest_list():
    assert list(blocks_of(model())) == [f"layers.{i}" for i in range(4)]
    assert blocks_of(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("first", [0, 2, 3])
def test_the_first_quantized_block_is_named(first: int, tmp_path: Path):
    a = sketch(model(), ids())
    a.save(tmp_path / "a.npz")
    found = first_divergence(load(tmp_path / "a.npz"), sketch(quantized(model(), (first, 3)), ids()))
    assert found is not None
    assert (found.layer, found.depth, found.n_layers) == (f"layers.{first}", first, 4)
    assert found.difference > 1e-4


def test_alike_arms_do_not_part_and_other_tokens_are_refused():
    a = sketch(model(), ids())
    found = first_divergence(a, sketch(model(), ids()))
    assert found is not None
    assert found.layer is None
    assert found.difference == 0.0
    with pytest.raises(UsageError, match="different tokens"):
        first_divergence(a, sketch(model(), ids(1)))
    with pytest.raises(UsageError, match="no list of blocks"):
        sketch(nn.Embedding(9, 4), ids())


def test_bfloat16_rounding_is_within_the_floor_that_another_batch_gives(tmp_path: Path):
    """Against float32 a bfloat16 stream is far off; against itself in another batch it is the floor."""
    whole, half = model().bfloat16(), model().bfloat16()
    for net in (whole, half):
        for block in net.layers:
            block.o = SplitK(64, 64, bias=False).bfloat16()
    half.load_state_dict(whole.state_dict())
    a = sketch(whole, ids(batch=6))
    rows = [sketch(half, ids(batch=6)[i : i + 3]) for i in (0, 3)]
    joined = {name: np.concatenate([each.blocks[name] for each in rows]) for name in a.blocks}
    other = type(a)(joined, a.tokens, a.eps)
    floor = first_divergence(a, other)
    assert floor is not None
    measured = first_divergence(a, other, floor=other)
    assert measured is not None
    assert measured.layer is None
    assert measured.is_measured
    off = first_divergence(a, sketch(quantized(whole, (1,)), ids(batch=6)), floor=other)
    assert off is not None
    assert off.layer == "layers.1"


def test_a_file_that_holds_no_sketches_is_refused(tmp_path: Path):
    (tmp_path / "a.npz").write_bytes(b"not a zip")
    with pytest.raises(UsageError, match="holds no sketches"):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize(("n", "sizes"), [(1, [2]), (2, [1, 1]), (6, [1, 2, 3]), (5, [1, 2, 2])])
def test_a_batch_is_put_together_otherwise(n: int, sizes: list[int]):
    net = model()
    call = capture(net, (ids(batch=n),), {"position_ids": torch.arange(12)[None], "scale": 2.0})
    parts = recomposed(call, n)
    assert [part.args[0].shape[0] for part in parts] == sizes
    if n > 1:
        assert torch.equal(torch.cat([part.args[0] for part in parts]), call.args[0])
        assert all(part.kwargs["position_ids"].shape == (1, 12) for part in parts)


def test_the_floor_is_what_the_recomposed_batch_gives():
    net = model()
    net.head = SplitK(64, len(ALPHABET), bias=False)
    tokens = ids(batch=6)
    floor = measure_floor(capture(net, (), {"input_ids": tokens}), linears(net))
    row = floor.arm.row()
    with torch.no_grad():
        p = net(tokens).double().log_softmax(-1)[:, :-1]
        q = torch.cat([net(tokens[i:j]) for i, j in ((0, 1), (1, 3), (3, 6))]).double().log_softmax(-1)[:, :-1]
    d = (q - p).gather(-1, tokens[:, 1:, None])[..., 0]
    assert row["n_tokens"] == d.numel()
    assert row["sum_log_prob_shift2"] == pytest.approx(float(d.square().sum()), rel=1e-6)
    assert row["sum_log_prob_shift2"] > 0
    assert row["sum_kl"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-6, abs=1e-16)
    kl, abs_d = measured_floor(pd.DataFrame([row]))
    assert kl == pytest.approx(row["sum_kl"] / row["n_tokens"])
    assert abs_d == pytest.approx(float(d.abs().mean()), rel=0.3)  # of a mean square, as if Gaussian
    layers = pd.DataFrame([{"step": 1, **each} for each in floor.rows()])
    assert set(layers["comparison"]) == {"floor", "floor_own"}
    assert first_of_frame(layers) is None  # floors alone compare nothing


def test_there_is_no_floor_where_the_model_draws():
    net = model()
    net.layers[0].o = nn.Sequential(net.layers[0].o, nn.Dropout(0.1))  # type: ignore[assignment]
    with pytest.raises(NotReplayableError, match="dropout"):
        measure_floor(capture(net, (ids(),), {}), linears(net))


def test_one_token_in_another_code_does_not_make_a_layer_diverge():
    a = torch.randn(100, 32, generator=torch.Generator().manual_seed(0)).double()
    b = a.clone()
    b[3] += 1.0
    made = difference(a, b)
    assert float(made.diff2) == pytest.approx(32.0)
    assert float(made.median_frac) == 0.0


def log_probs(abs_d: list[float], **floors: Any) -> LogProbs:
    one = np.ones(len(abs_d))
    values = np.array(abs_d)
    sums = {"n_tokens": one, "sum_d": values, "sum_abs_d": values, "sum_k3": values**2, "sum_w": one, "sum_w2": one}
    return LogProbs(sums, floors.pop("dtype", "bfloat16"), **floors)


def test_a_kl_is_said_as_a_multiple_of_its_measured_floor():
    weights = np.ones(8)
    seen = log_probs([0.1] * 8, floor_kl=2e-4, floor_abs_d=0.015)
    assert seen.kl_over_floor(weights) == pytest.approx(50.0)
    assert seen.floor == 0.015  # measured: the estimate of 16-bit dtypes is no longer needed
    assert "50 times its measured floor" in seen.floor_words(weights)
    assert "an estimate" in log_probs([0.1] * 8).floor_words(weights)
    assert "same bits" in log_probs([0.1] * 8, floor_kl=0.0, floor_abs_d=0.0).floor_words(weights)
    assert log_probs([0.1] * 8, dtype="float32", floor_kl=1e-12, floor_abs_d=1e-7).floor == 1e-3


def test_drift_is_relative_to_the_run_s_own_start():
    assert log_probs([0.01, 0.01, 0.02, 0.03, 0.03, 0.04, 0.05, 0.05]).drift() == pytest.approx(5.0)
    assert log_probs([0.02] * 8).drift() == pytest.approx(1.0)
    assert log_probs([0.02] * 7).drift() is None
    assert log_probs([0.0] * 8).drift() is None
