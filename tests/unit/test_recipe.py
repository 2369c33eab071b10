"""Recipes: names, one-line and TOML forms, and what is said about those that mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxprobe.emulation import NAMED_RECIPES, Operand, Recipe, Side
from mxprobe.emulation.recipe import ROLES
from mxprobe.errors import UsageError

OPERANDS = (
    "none",
    "mxfp4/rceil",
    "mxfp4/even",
    "mxfp4/floor+mbs:128",
    "mxfp4/rceil+had:32+of:0.5",
    "mxfp4/rceil+of:1.0",
    "mxfp4/rceil+sr",
    "mxfp4/rceil+2d",
    "mxfp4/rceil+sr+2d",
    "mxfp8/floor",
    "nvfp4",
)


def as_toml(recipe: Recipe) -> str:
    keys = ("name", "side", "include", "exclude", "keep_first", "keep_last", "attention")
    lines = [f"{key} = {json.dumps(getattr(recipe, key))}" for key in keys]
    return "\n".join([*lines, "[operands]", *(f'{role} = "{operand}"' for role, operand in recipe.operands.items())])


@pytest.mark.parametrize("text", OPERANDS)
def test_an_operand_prints_as_it_is_spelled(text: str) -> None:
    assert str(Operand.parse(text)) == text


def test_the_default_rule_and_the_order_of_corrections() -> None:
    assert str(Operand.parse("mxfp4")) == "mxfp4/rceil"
    with pytest.raises(ValueError, match="then at most one of:ALPHA"):
        Operand.parse("mxfp4+of:0.5+mbs:128")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fp4", "unknown format 'fp4'; known: none, "),
        ("mxfp4/ciel", "unknown scale rule 'ciel'"),
        ("nvfp4/rceil", "nvfp4 has no power-of-two scales"),
        ("nvfp4+2d", "need power-of-two scales"),
        ("mxfp8+mbs:128", "corrections are defined for mxfp4"),
        ("mxfp4+mbs", "takes a parameter"),
        ("mxfp4+mbs:128+had:32", "at most one of mbs and had"),
        ("mxfp4+of:0.5+sr", "do not combine"),
        ("mxfp4+nvfp4", "a rule is spelled mxfp4/RULE"),
        ("none+of:0.5", "takes no rule and no correction"),
        ("", "unknown format ''"),
    ],
)
def test_a_wrong_operand_says_why_and_how_to_spell_it(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="cannot read the operand") as unread:
        Operand.parse(text)
    assert why in str(unread.value)
    with pytest.raises(UsageError) as caught:
        Recipe.parse(f"paper x_fwd={text}")
    assert why in str(caught.value)
    assert "spell it FORMAT[/RULE]" in str(caught.value)


@pytest.mark.parametrize("name", NAMED_RECIPES)
def test_named_recipes_survive_both_forms(name: str) -> None:
    recipe = NAMED_RECIPES[name]
    assert str(recipe) == name
    assert Recipe.parse(name) is recipe
    assert Recipe.from_toml(as_toml(recipe)) == recipe


globs = st.lists(st.sampled_from(("*.q_proj", "model.layers.?.mlp.*", "*", "lm_head")), max_size=3).map(tuple)


@given(
    names=st.lists(st.sampled_from(OPERANDS), min_size=6, max_size=6),
    include=globs,
    exclude=globs,
    counts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    side=st.sampled_from(Side),
)
def test_any_recipe_survives_its_line_and_its_toml(
    names: list[str], include: tuple[str, ...], exclude: tuple[str, ...], counts: tuple[int, int], side: Side
) -> None:
    operands = {role: Operand.parse(text) for role, text in zip(ROLES, names, strict=True)}
    recipe = Recipe(
        "custom", include=include, exclude=exclude, keep_first=counts[0], keep_last=counts[1], side=side, **operands
    )
    line = str(recipe)
    assert "\n" not in line
    assert Recipe.parse(line) == recipe
    assert Recipe.from_toml(as_toml(recipe)) == recipe


def test_settings_override_groups_whatever_their_order() -> None:
    recipe = Recipe.parse("x_fwd=mxfp4/rceil+of:0.5 fwd=mxfp4/floor side=rollout")
    assert str(recipe.x_fwd) == "mxfp4/rceil+of:0.5"
    assert str(recipe.w_fwd) == "mxfp4/floor"
    assert recipe.g_dgrad.is_high_precision
    assert recipe.side is Side.ROLLOUT
    assert Recipe.parse("paper@rollout") == NAMED_RECIPES["paper"].on("rollout") == Recipe.parse("paper side=rollout")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("papr", "no recipe named 'papr'"),
        ("", "no recipe named ''"),
        ("paper x_fwd", "'x_fwd' is not KEY=VALUE"),
        ("paper x_bwd=mxfp4", "unknown key 'x_bwd'"),
        ("paper side=left", "unknown side 'left'"),
        ("paper keep_last=-1", "'-1' is not a count"),
        ("paper x_fwd=mxfp4+as_forward", "x_fwd: as_forward means nothing here"),
        ("missing.toml", "cannot read the recipe missing.toml: No such file"),
    ],
)
def test_a_wrong_recipe_says_why(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe.parse(text)
    assert why in str(caught.value)


def test_toml_files_are_read_and_their_errors_name_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nside = "train"\n[operands]\nx_fwd = "mxfp4/even"\n')
    recipe = Recipe.parse(str(path))
    assert (recipe.name, recipe.side, str(recipe.x_fwd)) == ("mine", Side.TRAIN, "mxfp4/even")
    assert recipe.w_fwd.is_high_precision
    path.write_text('nmae = "mine"\n')
    with pytest.raises(UsageError, match=r"mine\.toml: unknown keys nmae"):
        Recipe.parse(str(path))
    path.write_text("name = mine\n")
    with pytest.raises(UsageError, match=r"mine\.toml is not TOML"):
        Recipe.parse(str(path))


def test_a_recommended_correction_switches_on() -> None:
    paper = NAMED_RECIPES["paper"]
    assert str(paper.corrected("of:0.5").x_fwd) == "mxfp4/rceil+of:0.5"
    assert str(paper.corrected("of:0.5").corrected("mbs:128").x_fwd) == "mxfp4/rceil+mbs:128+of:0.5"
    assert str(paper.corrected("mbs:128").corrected("mbs:32").x_fwd) == "mxfp4/rceil+mbs:32"
    assert str(paper.corrected("rule:even", ("w_fwd",)).w_fwd) == "mxfp4/even"
    assert str(paper.corrected("nvfp4").x_fwd) == "nvfp4"
    assert paper.corrected("keep_high_precision").x_fwd.is_high_precision
    assert (
        str(NAMED_RECIPES["qat"].corrected("of:0.5", ("x_fwd", "x_wgrad")).x_wgrad) == "mxfp4/rceil+of:0.5+as_forward"
    )
    with pytest.raises(UsageError, match="of takes a parameter"):
        paper.corrected("of")


def test_recipes_parse_without_torch() -> None:
    code = "import sys; from mxprobe.emulation import Recipe; Recipe.parse('paper'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
