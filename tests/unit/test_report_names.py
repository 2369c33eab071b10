"""Names on the page: slugs never collide, order is the model's."""

import re

from hypothesis import given
from hypothesis import strategies as st

from mxprobe_reports import names


@given(st.lists(st.text(max_size=40), max_size=20))
def test_slugs_are_unique_and_safe_in_an_id_and_a_fragment(raw: list[str]) -> None:
    slugs = names.slugs(raw)
    assert len(set(slugs)) == len(raw)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) for slug in slugs)


def test_modules_that_slug_alike_stay_apart_even_from_a_name_that_looks_numbered() -> None:
    assert names.slugs(["a.b", "a_b", "a-b-2"]) == ["a-b", "a-b-2", "a-b-2-2"]


def test_a_long_name_gives_a_short_slug() -> None:
    assert len(names.slugs(["x" * 300])[0]) == 80


def test_order_is_that_of_the_model_then_natural() -> None:
    seen = ["layers.10.q", "layers.2.q", "head", "embed"]
    assert names.in_model_order(seen, ["embed", "unseen", "head"]) == ["embed", "head", "layers.2.q", "layers.10.q"]


def test_block_and_kind_of_a_module() -> None:
    assert names.block_of("model.layers.3.self_attn.q_proj") == "3"
    assert names.block_of("lm_head") == "lm_head"
    assert names.kinds_of(["model.layers.3.self_attn.q_proj", "lm_head", "_proj"]) == ["q", "lm_head", "_proj"]
