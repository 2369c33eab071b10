"""Q of one operand: the kernels' own bits, and the three things they do not offer (2-D blocks, stochastic, stacked)."""

import numpy as np
import pytest
import torch

from mxprobe.emulation import NAMED_RECIPES, Operand, quantize
from mxprobe_kernels import apply_correction, correction_errors, quantize_dequantize, stochastic
from mxprobe_kernels.formats import E2M1_GRID, MXFP4, Rule
from mxprobe_kernels.recipe_grammar import CHANNEL_WHATIFS, DEFAULT_WHATIFS

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("format", "rule"), [("mxfp4", "rceil"), ("mxfp4", "floor"), ("mxfp8", "even"), ("nvfp4", "")])
def test_plain_formats_have_the_kernels_bits(format: str, rule: str, dim: int, dtype: torch.dtype) -> None:
    x = draw(70, 45, dtype=dtype)
    operand = Operand.parse(f"{format}/{rule}" if rule else format)
    expected = quantize_dequantize(x, format=format, rule=rule or "rceil", dim=dim)[0]
    got = quantize(x, operand, dim=dim)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("correction", ["mbs:32", "mbs:128", "of:0.5", "had:32"])
def test_corrections_have_the_kernels_bits(correction: str) -> None:
    x = draw(64, 130)
    assert torch.equal(
        quantize(x, Operand.parse(f"mxfp4/even+{correction}"), dim=0),
        apply_correction(x, correction, rule="even", dim=0),
    )


def test_fallback_on_top_of_macro_blocks() -> None:
    x = draw(64, 256)
    first = apply_correction(x, "mbs:128")
    expected = first + 0.5 * apply_correction(x - first, "mbs:128")
    got = quantize(x, Operand.parse("mxfp4+mbs:128+of:0.5"), dim=-1)
    assert torch.equal(got, expected)
    energy = (got - x).square().sum() / (quantize(x, Operand.parse("mxfp4"), dim=-1) - x).square().sum()
    assert energy == pytest.approx(0.22, abs=0.01)  # science: MBS-128 + OF .5 on Gaussian data


def test_square_blocks_share_one_scale_and_read_the_same_in_both_directions() -> None:
    x = draw(70, 45)
    q = quantize(x, Operand.parse("mxfp4+2d"), dim=-1)
    assert torch.equal(q, quantize(x, Operand.parse("mxfp4+2d"), dim=0))
    assert torch.equal(q, quantize(x.t(), Operand.parse("mxfp4+2d"), dim=-1).t())
    tile = x[32:64, :32].double().numpy()
    fraction, power = np.frexp(np.abs(tile).max())
    scale = 2.0 ** (power - 3 if fraction <= 0.75 else power - 2)
    grid = np.array(E2M1_GRID)
    distance = np.abs(np.abs(tile)[..., None] / scale - grid)
    expected = np.copysign(grid[distance.argmin(-1)] * scale, tile)
    assert np.array_equal(q[32:64, :32].double().numpy(), expected)


@pytest.mark.parametrize("spelling", ["mxfp4+sr", "mxfp4+sr+2d", "mxfp8+sr"])
def test_stochastic_rounding_is_unbiased_on_the_grid_and_repeatable(spelling: str) -> None:
    x = draw(32, 64)
    operand = Operand.parse(spelling)
    draws = torch.stack([quantize(x, operand, dim=-1, salt=salt) for salt in range(400)])
    assert torch.equal(draws[7], quantize(x.clone(), operand, dim=-1, salt=7))
    assert not torch.equal(draws[0], draws[1])
    # Unbiased: the mean of n draws misses x by no more than their own spread allows. Nearest rounding gives n.
    error = draws.double() - x.double()
    assert float(len(draws) * error.mean(0).square().sum() / error.square().mean(0).sum()) == pytest.approx(1, abs=0.15)
    # Only the two neighbours of each value ever appear.
    assert max(len(values.unique()) for values in draws.flatten(1).t()) == 2


def test_stochastic_rounding_doubles_the_error() -> None:
    x = draw(1024, 256)
    plain = (quantize(x, Operand.parse("mxfp4"), dim=-1) - x).square().sum()
    draws = [(quantize(x, Operand.parse("mxfp4+sr"), dim=-1, salt=8 * k) - x).square().sum() for k in range(8)]
    assert float(torch.stack(draws).mean() / plain) == pytest.approx(2.05, rel=0.02)  # science, section 5


@pytest.mark.parametrize("correction", [*DEFAULT_WHATIFS, *CHANNEL_WHATIFS, "sr", "mxfp4_4over6", "mxfp6_e3m2"])
@pytest.mark.parametrize("dim", [0, -1])
def test_what_a_what_if_scores_is_what_is_switched_on(correction: str, dim: int) -> None:
    """Element for element, stochastic rounding included: seed 0 of emulation is the first draw of a what-if."""
    x = draw(70, 130)
    operand = NAMED_RECIPES["paper"].corrected(correction).x_fwd
    assert torch.equal(quantize(x, operand, dim=dim), apply_correction(x, correction, dim=dim))


@pytest.mark.parametrize("rule", [Rule.RCEIL, Rule.FLOOR], ids=str)
def test_the_score_of_stochastic_rounding_is_the_mean_over_emulated_draws(rule: Rule) -> None:
    x = draw(40, 96)
    draws = [stochastic.quantize(x, MXFP4, rule, -1, draw=k).double() - x.double() for k in range(stochastic.DRAWS)]
    assert torch.equal(draws[0].float(), (quantize(x, Operand("mxfp4", rule, stochastic=True), dim=-1) - x))
    scored = correction_errors(x, ["sr"], rule=rule)[0]
    energy = torch.stack([error.square().sum() for error in draws]).mean()
    assert float(scored[2]) == pytest.approx(float(energy), rel=1e-12)


def test_two_micro_batches_of_one_step_are_rounded_differently() -> None:
    """The draw depends on the value too: the same salt and place, but other values, and the errors are unrelated."""
    a, b = draw(64, 64, seed=1), draw(64, 64, seed=2)
    scale = torch.full((64, 64), 6.0)
    operand = Operand.parse("mxfp4+sr")
    ups = [
        quantize(torch.where(torch.arange(64) % 32 == 0, scale, 1.25 + t / 1e4), operand, dim=-1) > 1.25 for t in (a, b)
    ]
    alike = (ups[0] == ups[1])[:, 1:32].float().mean()
    assert float(alike) == pytest.approx(0.5, abs=0.05)


def test_a_nan_poisons_its_block_alone_and_the_global_generator_is_left_alone() -> None:
    x = draw(4, 64)
    x[1, 3] = float("nan")
    before = torch.get_rng_state()
    for spelling in ("mxfp4", "mxfp4+sr", "mxfp4+of:0.5", "nvfp4"):
        q = quantize(x, Operand.parse(spelling), dim=-1, salt=1)
        block = 16 if spelling == "nvfp4" else 32
        assert q[1, :block].isnan().all()
        assert q.isnan().sum() == block
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_in_high_precision_is_the_tensor_itself() -> None:
    x = draw(4, 8).requires_grad_()
    assert torch.equal(quantize(x, Operand(), dim=-1), x)
    assert not quantize(x, Operand(), dim=-1).requires_grad
