"""MXFP6, HiF4 and Four-over-Six: the torch path against the reference bit for bit, the reference against golden data
made by the formats' own authors, and both against what can be done by hand."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from mxprobe_kernels import apply_correction, quantize_dequantize
from mxprobe_kernels.formats import FORMATS, Rule, ScaleType
from mxprobe_kernels.recipe_grammar import Correction
from tests.cases import GOLDEN, hard_tensors, same_bits
from tests.reference_formats import quantize

BY_SEARCH = [name for name, f in FORMATS.items() if f.scale in (ScaleType.E8M0, ScaleType.E6M2) or f.four_over_six]


def golden() -> list[Any]:
    return json.loads((GOLDEN / "golden_formats.json").read_text())["cases"]


def of_bits(case: Any) -> np.ndarray:
    bits = np.array([int(word, 16) for word in case["x_bits"]], np.uint32)
    return bits.view(np.float32).reshape(case["shape"])


def torch_path(x: np.ndarray, format: str, rule: str = "rceil", dim: int = -1) -> np.ndarray:
    # float64 in, so that no value is rounded on the way out; the kernel reads float32.
    return quantize_dequantize(torch.from_numpy(x).double(), format=format, rule=rule, dim=dim)[0].numpy()


@pytest.mark.parametrize("case", [c for c in golden() if c["format"] == "hif4"], ids=lambda c: c["name"])
def test_hif4_is_its_authors(case: Any) -> None:
    x, expected = of_bits(case), np.array(case["q"]).reshape(case["shape"])
    assert np.array_equal(quantize(x, "hif4"), expected)
    assert np.array_equal(torch_path(x, "hif4"), expected)


@pytest.mark.parametrize("case", [c for c in golden() if c["format"] == "nvfp4_4over6"], ids=lambda c: c["name"])
def test_four_over_six_is_its_authors(case: Any) -> None:
    """Theirs computes in float32; which of the two scales a block takes is the same, values to float32's precision."""
    x, expected = of_bits(case), np.array(case["q"]).reshape(case["shape"])
    assert np.allclose(quantize(x, "nvfp4_4over6"), expected, rtol=1e-6, atol=0)
    assert 0 < sum(case["to_four"]) < len(case["to_four"])


def rules_of(format: str) -> list[str]:
    return [rule.value for rule in Rule] if FORMATS[format].scale is ScaleType.E8M0 else ["rceil"]


@pytest.mark.parametrize(("format", "rule"), [(name, rule) for name in BY_SEARCH for rule in rules_of(name)])
def test_the_torch_path_has_the_bits_of_the_reference(format: str, rule: str) -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((48, 150)) * np.exp2(rng.integers(-9, 9, (48, 1)))).astype(np.float32)
    x[0], x[1, 40], x[2, 3], x[3] = 0, np.nan, np.inf, rng.standard_normal(150) * 1e-40
    x[4:8] = x[4:8].astype(ml_dtypes.bfloat16)  # many exact ties
    x[8, :14] = np.arange(14) / 4
    for dim in (-1, 0):
        assert same_bits(torch_path(x, format, rule, dim), quantize(x, format, rule=rule, axis=dim))


@pytest.mark.parametrize("format", BY_SEARCH)
def test_hard_tensors_have_the_bits_of_the_reference(format: str) -> None:
    for name, x in hard_tensors():
        values = x.float().numpy()
        assert same_bits(torch_path(values, format), quantize(values, format)), name


@pytest.mark.parametrize(
    ("format", "dtype"), [("mxfp6_e3m2", ml_dtypes.float6_e3m2fn), ("mxfp6_e2m3", ml_dtypes.float6_e2m3fn)]
)
def test_mxfp6_elements_are_those_of_ocp(format: str, dtype: Any) -> None:
    codes = np.arange(32, dtype=np.uint8).view(dtype).astype(np.float64)
    assert FORMATS[format].grid == tuple(codes)
    assert FORMATS[format].block == 32
    # A block whose amax is the largest element has scale 1: every element comes back as it is.
    assert np.array_equal(torch_path(codes[None].astype(np.float32), format), codes[None])


def test_hif4_by_hand() -> None:
    """amax 7: bf16(7 * 146/1024) = .99609375 = E6M2 1.0, so z = x. Levels: [7 ..] of 8 has e8 = 1; its fours differ."""
    x = np.zeros((1, 64), np.float32)
    x[0, :8] = [7.0, 0.49, 0.51, -3.3, 1.9, 0.2, 0.25, 0.26]
    x[0, 8:12] = [3.5, 0.26, -0.24, 0.125]
    x[0, 16:20] = [1.75, 0.125, 0.124, -1.9]
    q = torch_path(x, "hif4")[0]
    assert q[:4].tolist() == [7.0, 0.0, 1.0, -3.0]  # e8 = e4 = 1, steps of 1; .49 rounds down
    assert q[4:8].tolist() == [2.0, 0.0, 0.5, 0.5]  # e8 = 1, steps of .5; ties go up
    assert q[8:12].tolist() == [3.5, 0.5, 0.0, 0.0]  # e8 = 0, e4 = 1
    assert q[16:20].tolist() == [1.75, 0.25, 0.0, -1.75]  # no exponent: 1.9 saturates


def test_four_over_six_by_hand() -> None:
    """Block [6 ... 4.5]: to 6 leaves .5 or so on 4.5, to 4 (s = 1.5) holds 4.5 and 6 exactly."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 1], x[0, 16], x[0, 17] = 6.0, 4.5, 6.0, 3.0
    unit = np.float64(np.float32(6) / np.float32(256 * 6))
    q = torch_path(x, "nvfp4_4over6")[0]
    assert q[[0, 1]].tolist() == [4 * 384 * unit, 3 * 384 * unit] == [6.0, 4.5]
    assert q[[16, 17]].tolist() == [6 * 256 * unit, 3 * 256 * unit] == [6.0, 3.0]
    assert abs(torch_path(x, "nvfp4")[0, 1] - 4.5) > 0.4


def test_mxfp4_over_six_saturates_a_block_only_where_it_helps() -> None:
    """amax 7 is in floor's s = 1 the 6 that it saturates to, in rceil's s = 2 the 8 next to 3.5: an error of 1 either
    way. So the rest of the block decides: .5 is held under s = 1 and lost under s = 2; 8 - 1/64 is far from 6."""
    x = torch.zeros(3, 32)
    x[0, :2] = torch.tensor([7.0, 0.5])
    x[1, :2] = torch.tensor([8 - 1 / 64, 0.5])
    x[2, 0] = 7.0
    q, exponent = quantize_dequantize(x, format="mxfp4_4over6")
    assert exponent.flatten().tolist() == [0, 1, 1]
    assert q[:, :2].tolist() == [[6.0, 0.5], [8.0, 0.0], [8.0, 0.0]]


@pytest.mark.parametrize("format", ["mxfp4_4over6", "nvfp4_4over6"])
def test_no_block_is_worse_than_with_either_scale(format: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.laplace(size=(64, 256)).astype(np.float32)
    block = FORMATS[format].block

    def block_errors(q: np.ndarray) -> np.ndarray:
        return ((q - x) ** 2).reshape(-1, block).sum(1)

    chosen = block_errors(quantize(x, format))
    if format == "mxfp4_4over6":
        either = [block_errors(quantize(x, "mxfp4", rule=rule)) for rule in ("rceil", "floor")]
        assert np.array_equal(chosen, np.minimum(*either))
        assert (either[1] < either[0]).any()
        assert (either[0] < either[1]).any()
    else:
        assert chosen.sum() < 0.95 * block_errors(torch_path(x, "nvfp4")).sum()


@pytest.mark.parametrize("format", [name for name in BY_SEARCH if name != "mxfp4"])
def test_each_is_a_correction_by_its_own_name(format: str) -> None:
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(4))
    assert Correction.parse(format).format is FORMATS[format]
    assert torch.equal(apply_correction(x, format), torch.from_numpy(quantize(x.numpy(), format)).float())


def test_only_the_choice_between_powers_of_two_is_still_mxfp4() -> None:
    assert [name for name in BY_SEARCH if name != "mxfp4" and Correction.parse(name).keeps_format] == ["mxfp4_4over6"]
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    floor = torch.from_numpy(quantize(x.numpy(), "mxfp4_4over6", rule="floor")).float()
    assert torch.equal(apply_correction(x, "mxfp4_4over6", rule="floor"), floor)


def test_real_valued_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="fp8_block has no reference here"):
        quantize(np.ones((1, 128)), "fp8_block")
