"""The float64 reference against the golden file and against the dtypes of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from mxprobe_kernels import reference
from mxprobe_kernels.formats import FORMATS, MXFP4, Rule
from tests.cases import Case, disagreements, golden_cases, golden_q, same_bits

RULES = [rule.value for rule in Rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", golden_cases(), ids=lambda c: c.name)
def test_golden_case(case: Case, rule: str):
    expected = case.rules[rule]
    result = reference.decompose(case.x.numpy(), rule=rule)
    assert result.exponent.reshape(-1).tolist() == expected["exponent"]
    assert same_bits(result.q.reshape(-1), golden_q(expected))
    assert disagreements(result.values, expected, rtol=1e-9) == []


@pytest.mark.parametrize(
    ("draw", "e2", "ratios"),
    [
        ("standard_normal", 1759.427215, (1.753115, 0.020590, 0.740788, -1.514494)),
        ("laplace", 4615.087477, (1.567208, 0.051973, 0.545732, -1.164914)),
    ],
)
def test_golden_tensor(draw: str, e2: float, ratios: tuple[float, ...]):
    x = getattr(np.random.default_rng(0), draw)(size=(4096, 32))
    v = reference.decompose(x).values
    assert v["sum_e2"] == pytest.approx(e2, rel=1e-8)
    measured = (v["sum_scale2"], v["sum_dz2"], v["sum_grid2"], 2 * v["sum_scale_grid"])
    assert [m / v["sum_e2"] for m in measured] == pytest.approx(ratios, abs=1e-6)


def test_columns_are_rows_of_the_transpose():
    x = np.random.default_rng(1).standard_normal((70, 45)).astype(np.float32)
    down, across = reference.decompose(x, axis=0), reference.decompose(np.ascontiguousarray(x.T))
    assert disagreements(down.values, across.values, rtol=1e-12) == []
    assert np.array_equal(down.q, across.q.T)
    assert down.exponent.shape == (3, 45)


@pytest.mark.parametrize("rule", RULES)
def test_exponent_of_every_mantissa_matches_the_bit_trick(rule: str):
    """`Format.amax_bias` and frexp agree at each power of two and at all boundaries within a binade."""
    mantissas = np.unique(np.concatenate([np.arange(0, 1 << 23, 4097), (np.array([0, 1, 2, 3, 4, 5, 6, 7]) << 20)]))
    mantissas = np.unique(np.concatenate([mantissas, mantissas + 1, mantissas - 1]).clip(0, (1 << 23) - 1))
    bits = (np.arange(0, 255)[:, None] << 23) + mantissas[None, :]
    amax = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    expected, _ = reference.exponents(amax, Rule(rule))
    measured = np.clip(((bits + MXFP4.amax_bias(Rule(rule))) >> 23) - 129, -127, 127)
    assert np.array_equal(np.where(bits == 0, -127, measured), expected)


def test_rounding_matches_ml_dtypes_on_every_bfloat16():
    up_to_six = 0x40C0
    z = np.arange(up_to_six + 1, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    ours = np.array(MXFP4.grid)[reference.round_e2m1(4 * z, np.ones_like(z))]
    assert np.array_equal(ours, z.astype(ml_dtypes.float4_e2m1fn).astype(np.float64))


@pytest.mark.parametrize(("name", "dtype"), [("mxfp4", ml_dtypes.float4_e2m1fn), ("mxfp8", ml_dtypes.float8_e4m3fn)])
def test_grids_are_those_of_ml_dtypes(name: str, dtype: type):
    bits = 8 * np.dtype(dtype).itemsize if name == "mxfp8" else 4
    nan_codes = 1 if name == "mxfp8" else 0
    codes = np.arange((1 << (bits - 1)) - nan_codes, dtype=np.uint8).view(dtype)
    assert FORMATS[name].grid == tuple(codes.astype(np.float64))
