"""Text becomes markup only where it is meant to."""

from hypothesis import given
from hypothesis import strategies as st

from mxprobe_reports import markup
from mxprobe_reports.markup import Html, esc, tag


@given(st.text())
def test_text_cannot_become_markup(text: str) -> None:
    rendered = tag("p", text, title=text)
    inner = rendered.removeprefix("<p ").removesuffix("</p>")
    assert inner.count("<") == 0
    assert inner.count('"') == 2


def test_markup_passes_and_stays_markup_when_text_is_added() -> None:
    joined = tag("b", "x") + " < y"
    assert joined == "<b>x</b> &lt; y"
    assert esc(joined) is joined


def test_attributes_spell_reserved_words_and_dashes_and_leave_none_out() -> None:
    assert tag("i", class_="a", data_key="b", id=None) == '<i class="a" data-key="b"></i>'


def test_table_escapes_cells_and_aligns_numbers() -> None:
    assert '<td class="num">&lt;1</td>' in markup.table(["n"], [["<1"]], numeric=[0])
    assert "<td><b>1</b></td>" in markup.table(["n"], [[Html("<b>1</b>")]])
