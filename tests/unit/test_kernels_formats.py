"""Every format against an independent oracle: the casts of ml_dtypes and the integers of numpy."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mxprobe_kernels import decompose, error_fields, quantize_dequantize
from mxprobe_kernels.formats import FORMATS, Format, Rule, ScaleType, minifloat_grid
from mxprobe_kernels.rounding import e2m1_code, round_to_grid
from tests.reference_formats import quantize

ELEMENTS = {
    6.0: ml_dtypes.float4_e2m1fn,
    7.5: ml_dtypes.float6_e2m3fn,
    28.0: ml_dtypes.float6_e3m2fn,
    448.0: ml_dtypes.float8_e4m3fn,
}


def _draw(block: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64, 2 * block)) * np.exp2(rng.integers(-6, 6, (64, 1)))
    return x.astype(np.float32)


def _cast(z: np.ndarray, dtype: type, limit: float) -> np.ndarray:
    return np.clip(z, -limit, limit).astype(dtype).astype(np.float64)


def _oracle(x: np.ndarray, format: Format) -> np.ndarray:
    """Q(x) by the casts of ml_dtypes, scales in float64; block scales by `rceil` where they are powers of two."""
    if format.four_over_six or format.name == "hif4":
        return quantize(x, format)
    blocks = x.reshape(64, -1, format.block).astype(np.float64)
    amax = np.abs(blocks).max(-1, keepdims=True)
    if format.block_rows > 1:  # all rows of the draw are within one row of squares
        amax = amax.max(0, keepdims=True)
    if format.scale is ScaleType.E8M0:
        scale = np.exp2(np.ceil(np.log2(amax) - np.log2(format.qmax)))
    elif format.name == "nvfp4":
        tensor = np.float64(np.float32(amax.max()) / np.float32(448 * 6))
        scale = _cast(amax / 6 / tensor, ml_dtypes.float8_e4m3fn, 448) * tensor
    else:
        scale = (amax / format.qmax).astype(np.float32).astype(np.float64)
    z = blocks / scale
    if format.name == "int4_group":
        q = np.clip(np.rint(z), -7, 7)
    else:
        element = ELEMENTS[format.qmax]
        # through float32, as ml_dtypes casts from it; z of these draws is no closer to a tie than float32 can tell
        q = _cast(z.astype(np.float32), element, format.qmax)
    return (q * scale).reshape(x.shape)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_quantizer_matches_the_oracle(format: Format):
    x = _draw(format.block)
    fields = error_fields(torch.from_numpy(x), format=format)
    assert np.allclose(fields.q.numpy(), _oracle(x, format), rtol=1e-12, atol=0)
    q, _ = quantize_dequantize(torch.from_numpy(x).double(), format=format)
    assert torch.equal(q, fields.q)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_components_add_up_in_every_format(format: Format):
    d = decompose(torch.from_numpy(_draw(format.block, seed=1)), format=format.name, backend="torch")
    total = d.sum_scale2 + d.sum_dz2 + d.sum_grid2 + 2 * (d.sum_scale_grid + d.sum_scale_dz)
    assert total == pytest.approx(d.sum_e2, rel=1e-10)
    assert d.format == format.name
    assert 0 < d.sum_e2 < 0.02 * d.sum_x2
    assert (sum(d.code_hist) > 0) == (format.qmax == 6)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_grid_values_and_midpoints_round_to_even_codes(format: Format):
    grid = torch.tensor(format.grid, dtype=torch.float64)
    assert torch.equal(round_to_grid(grid, format), grid)
    middle = (grid[:-1] + grid[1:]) / 2
    codes = torch.searchsorted(grid, round_to_grid(middle, format))
    assert torch.equal(codes, torch.arange(len(middle)) + torch.arange(len(middle)) % 2)
    assert round_to_grid(grid[-1:] * 100, format).item() == format.qmax


def test_e2m1_codes_count_up():
    assert e2m1_code(torch.tensor(FORMATS["mxfp4"].grid)).tolist() == list(range(8))


def test_minifloat_grid_is_that_of_e5m2():
    codes = np.arange(0x7C, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
    assert minifloat_grid(2, -14, 57344.0) == tuple(codes)


@pytest.mark.parametrize("rule", list(Rule), ids=str)
def test_mxfp8_scales_follow_their_rules(rule: Rule):
    """m / s for amax m: at most 448 where the rule covers amax, and under 2^9 times the rule's slack elsewhere."""
    m = torch.exp2(torch.linspace(-20, 20, 4001))[:, None].repeat(1, 32)
    _, exponent = quantize_dequantize(m, format="mxfp8", rule=rule)
    ratio = m[:, :1].double() / torch.exp2(exponent.double())
    low, high = {
        Rule.RCEIL: (224, 448),
        Rule.CEIL: (128, 256),
        Rule.FLOOR: (256, 512),
        Rule.EVEN: (248, 496),
        Rule.OAS: (248, 496),
        Rule.FLOOR_DIV: (448, 896),
    }[rule]
    assert low * 0.999 <= ratio.min() < low * 1.01
    assert high * 0.99 < ratio.max() <= high * 1.001


def test_a_flushed_nvfp4_scale_is_counted():
    x = torch.zeros(2, 16)
    x[0], x[1] = 1.0, 1e-9
    d = decompose(x, format="nvfp4")
    assert d.n_clamped == 1
    assert d.n_zeroed == 16


def test_squares_that_are_cut_short():
    """Four squares of 128 x 128, of which three are ragged; a NaN excludes one of them; padding is not counted."""
    x = torch.randn(150, 200, generator=torch.Generator().manual_seed(2))
    x[140, 3] = torch.nan
    q, exponent = quantize_dequantize(x, format="fp8_square")
    assert exponent.shape == (150, 2)
    for rows in (slice(0, 128), slice(128, 150)):
        for columns in (slice(0, 128), slice(128, 200)):
            part = x[rows, columns]
            if part.isnan().any():
                assert q[rows, columns].isnan().all()
                continue
            scale = (part.abs().max().double() / 448).float().double()
            cast = (part.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
            assert torch.equal(q[rows, columns], cast.float())
    d = decompose(x, format="fp8_square", backend="torch")
    assert (d.n, d.n_blocks, d.n_blocks_excluded, d.n_nonfinite) == (150 * 200 - 22 * 128, 4, 1, 1)
    turned = decompose(x.t(), format="fp8_square", dim=0, backend="torch")
    assert turned.sum_e2 == pytest.approx(d.sum_e2, rel=1e-12)
