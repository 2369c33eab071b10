import pytest
import torch

from mxprobe.attribution.measured import correction_of
from mxprobe.measuring.recipes import CORRECTED, OTHER_FORMATS, RULES, Call, candidates, infer_recipe, quantize
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS, NONE


@pytest.fixture
def call() -> Call:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 128, generator=generator)
    x[:, 7::32] *= 20
    w = torch.randn(80, 128, generator=generator)
    for operand in (x, w):  # a block maximum of exactly 3.5 is the one thing in which `oas` differs from `even`
        operand[:, 96:].clamp_(-3, 3)
        operand[:, 96] = 3.5
    return Call(x, w, x.double() @ w.double().T)


def run(call: Call, recipe_x: str, recipe_w: str) -> Call:
    y = quantize(call.x, recipe_x).double() @ quantize(call.w, recipe_w).double().T
    return call._replace(y=y)


@pytest.mark.parametrize("name", [*RULES, *CORRECTED, *OTHER_FORMATS])
@pytest.mark.parametrize("side", ["both", "x", "w"])
def test_a_planted_recipe_is_found(call: Call, name: str, side: str):
    planted = (NONE if side == "w" else name, NONE if side == "x" else name)
    recipe, sums = infer_recipe(run(call, *planted))
    assert recipe == planted
    assert sums["exact"]
    assert sums["realised2"] == pytest.approx(sums["predicted2"], rel=1e-3)


@pytest.mark.parametrize("name", [*CORRECTED, *OTHER_FORMATS])
def test_a_correction_of_one_operand_alone_is_found(call: Call, name: str):
    for planted in ((name, RULES[0]), (RULES[0], name)):
        recipe, sums = infer_recipe(run(call, *planted))
        assert recipe == planted
        assert sums["exact"]


def test_every_correction_that_can_be_recommended_is_recognised_once_it_is_on():
    assert {correction_of(name) for name in (*RULES, *CORRECTED, *OTHER_FORMATS)} >= set(DEFAULT_WHATIFS)


def test_an_untouched_product_is_none(call: Call):
    recipe, sums = infer_recipe(call)
    assert recipe == (NONE, NONE)
    assert sums["exact"]
    assert sums["predicted2"] == 0
    assert sums["realised2"] < 1e-9 * sums["ref2"]


def test_a_bfloat16_layer_is_none_and_a_bfloat16_output_is_still_exact(call: Call):
    halves = Call(call.x.bfloat16(), call.w.bfloat16(), (call.x.bfloat16() @ call.w.bfloat16().T))
    assert infer_recipe(halves)[0] == (NONE, NONE)
    quantized = run(call, "mxfp4+rceil", "mxfp4+rceil")
    recipe, sums = infer_recipe(quantized._replace(y=quantized.y.bfloat16()))
    assert recipe == ("mxfp4+rceil", "mxfp4+rceil")
    assert sums["exact"]


@pytest.mark.parametrize("first", ["quantized", "rounded"])
def test_under_autocast_both_orders_of_rounding_and_quantizing_are_exact(call: Call, first: str):
    operands = [t.bfloat16() if first == "rounded" else t for t in (call.x, call.w)]
    qx, qw = (quantize(t, "mxfp4+rceil").bfloat16() for t in operands)
    recipe, sums = infer_recipe(call._replace(y=qx @ qw.T, dtype=torch.bfloat16))
    assert recipe == ("mxfp4+rceil", "mxfp4+rceil")
    assert sums["exact"]


def test_under_autocast_an_untouched_product_is_none(call: Call):
    recipe, sums = infer_recipe(call._replace(y=call.x.bfloat16() @ call.w.bfloat16().T, dtype=torch.bfloat16))
    assert recipe == ("none", "none")
    assert sums["residual2"] < 4e-6 * sums["ref2"]
    assert sums["predicted2"] > 0


def test_stale_weights_are_far_from_what_any_recipe_predicts(call: Call):
    other = call._replace(w=call.w + 0.5 * torch.randn(call.w.shape, generator=torch.Generator().manual_seed(2)))
    stale = call._replace(y=run(other, "mxfp4+rceil", "mxfp4+rceil").y)
    _, sums = infer_recipe(stale)
    assert not sums["exact"]
    assert sums["realised2"] > 1.25 * sums["predicted2"]
    assert sums["residual2"] > 0.01 * sums["ref2"]


def test_where_recipes_agree_the_previous_one_stays_and_rceil_is_named_first():
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(32, 64, generator=generator), torch.randn(48, 64, generator=generator)
    even = run(Call(x, w, x), "mxfp4+even", "mxfp4+even")
    assert torch.equal(even.y, run(even, "mxfp4+oas", "mxfp4+oas").y)
    assert infer_recipe(even)[0] == ("mxfp4+even", "mxfp4+even")
    assert infer_recipe(even, ("mxfp4+oas", "mxfp4+oas"))[0] == ("mxfp4+oas", "mxfp4+oas")
    assert RULES[0] == "mxfp4+rceil"


def test_a_recipe_that_fits_the_first_rows_only_is_not_taken(call: Call):
    mixed = run(call, "mxfp4+rceil", "mxfp4+rceil")
    y = mixed.y.clone()
    y[20:] = run(call, "mxfp4+floor", "mxfp4+floor").y[20:]
    _, sums = infer_recipe(mixed._replace(y=y))
    assert not sums["exact"]


def test_each_recipe_is_tried_once():
    previous = ("mxfp4+floor", NONE)
    tried = list(candidates(previous))
    assert tried[0] == previous
    others = len(OTHER_FORMATS) * (3 + 2 * len(RULES))  # with themselves, on one side alone, with each plain rule
    assert len(tried) == len(set(tried)) == len((NONE, *RULES, *CORRECTED)) ** 2 + others
