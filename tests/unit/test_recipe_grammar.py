"""One grammar: every spelling of every operand reads back, and each form is printed as it always was."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxprobe.emulation import NAMED_RECIPES
from mxprobe.measuring.recipes import CORRECTED, OTHER_FORMATS, RULES
from mxprobe_kernels.formats import FORMATS, Rule, ScaleType
from mxprobe_kernels.recipe_grammar import (
    CHANNEL_WHATIFS,
    DEFAULT_WHATIFS,
    NONE,
    Correction,
    CorrectionKind,
    Operand,
)

CORRECTIONS = (
    *(f"rule:{rule}" for rule in Rule),
    *("mbs:32", "mbs:64", "mbs:128", "mbs:256", "of:0.3", "of:0.5", "of:1.0", "had:16", "had:32", "had:128"),
    *CHANNEL_WHATIFS,
    *(kind.value for kind in CorrectionKind if kind.value in (*FORMATS, "sr", "keep_high_precision")),
)
KNOWN = (NONE, *RULES, *CORRECTED, *OTHER_FORMATS)
"""What columns `recipe_x` and `recipe_w` of stored traces hold."""


def test_known_recipes_and_corrections_are_still_spelled_so() -> None:
    assert [*RULES] == [f"mxfp4+{name}" for name in ("rceil", "floor", "even", "ceil", "oas", "floor_div")]
    assert CORRECTED[:6] == (
        "mxfp4+of:0.5",
        "mxfp4+of:1.0",
        "mxfp4+mbs:128",
        "mxfp4+mbs:64",
        "mxfp4+mbs:32",
        "mxfp4+had:32",
    )
    assert CORRECTED[6:] == ("nvfp4", "mxfp8")
    assert {*DEFAULT_WHATIFS} <= {*CORRECTIONS}


@pytest.mark.parametrize("text", CORRECTIONS)
def test_a_correction_survives_every_spelling(text: str) -> None:
    operand = Operand.from_correction(text)
    assert str(Correction.parse(text)) == text
    assert str(operand.correction) == text
    assert {Operand.parse(spelling) for spelling in (text, operand.inferred, str(operand))} == {operand}


@pytest.mark.parametrize("text", KNOWN)
def test_an_inferred_recipe_survives_every_spelling(text: str) -> None:
    operand = Operand.parse(text)
    assert operand.inferred == text
    assert {Operand.parse(spelling) for spelling in (str(operand), str(operand.correction))} == {operand}


@pytest.mark.parametrize("name", NAMED_RECIPES)
def test_operands_of_named_recipes_survive_every_spelling(name: str) -> None:
    for operand in NAMED_RECIPES[name].operands.values():
        assert Operand.parse(str(operand)) == Operand.parse(operand.inferred) == operand


rules = st.sampled_from(Rule)
below = st.sampled_from(("mbs:32", "mbs:128", "had:2", "had:32"))
alphas = st.floats(1e-6, 4, allow_nan=False).map(lambda alpha: f"of:{alpha}")
stacks = st.one_of(
    st.just(()),
    below.map(lambda c: (c,)),
    alphas.map(lambda c: (c,)),
    st.tuples(below, alphas),
    st.just(("channels:5",)),
)


@st.composite
def operands(draw: st.DrawFn) -> Operand:
    format = draw(st.sampled_from((NONE, *FORMATS)))
    if format == NONE:
        return Operand()
    has_rule = FORMATS[format].scale is ScaleType.E8M0
    corrections = tuple(map(Correction.parse, draw(stacks))) if format == "mxfp4" else ()
    free = has_rule and not corrections
    return Operand(
        format,
        draw(rules) if has_rule else Rule.RCEIL,
        corrections,
        stochastic=free and draw(st.booleans()),
        square=free and draw(st.booleans()),
        as_forward=draw(st.booleans()),
    )


@given(operands())
def test_any_operand_survives_both_of_its_spellings(operand: Operand) -> None:
    assert Operand.parse(str(operand)) == Operand.parse(operand.inferred) == operand
    if operand.correction is not None:
        assert Operand.from_correction(operand.correction) == Operand.parse(str(operand.correction)) == operand


def test_no_two_known_operands_share_a_spelling() -> None:
    known = {Operand.parse(text) for text in (*KNOWN, *CORRECTIONS)}
    for a, b in itertools.combinations(known, 2):
        assert len({str(a), str(b)}) == len({a.inferred, b.inferred}) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mxfp4/even+floor", "it names 2 scale rules"),
        ("nvfp4+floor", "nvfp4 has no power-of-two scales"),
        ("mbs:48", "the block must be a positive multiple of 32"),
        ("had:12", "must be a power of two"),
        ("channels:101", "must be above 0 and at most 100"),
        ("mxfp4+channels:5+of:0.5", "stands alone"),
        ("keep_high_precision+sr", "takes no rule and no correction"),
    ],
)
def test_what_means_nothing_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="cannot read the operand") as caught:
        Operand.parse(text)
    assert why in str(caught.value)


def test_corrections_join_or_replace_their_like() -> None:
    operand = Operand.from_correction("of:0.5")
    assert str(operand.corrected("mbs:128")) == str(Operand.parse("mbs:128").corrected("of:0.5"))
    assert str(operand.corrected("mbs:128").corrected("had:32").corrected("of:1.0")) == "mxfp4/rceil+had:32+of:1.0"
    for other in ("channels:5", "sr"):
        with pytest.raises(ValueError, match=r"stands alone|do not combine"):
            operand.corrected(other)


@pytest.mark.parametrize("text", ["sr", "channels:5"])
def test_every_correction_that_is_scored_can_be_switched_on(text: str) -> None:
    assert str(NAMED_RECIPES["paper"].corrected(text).x_fwd) == f"mxfp4/rceil+{text}"
