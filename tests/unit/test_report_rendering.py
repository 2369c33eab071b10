"""Text becomes markup only where it is meant to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from mxprobe_reports.rendering import code, render
from mxprobe_reports.versions_card import versions


@given(st.text(min_size=1))
def test_text_cannot_become_markup(text: str) -> None:
    rendered = render("note.html", title=text, text=text, id=text, kind=text)
    plain = render("note.html", title="x", text="x", id="x", kind="x")
    assert [rendered.count(mark) for mark in '<>"'] == [plain.count(mark) for mark in '<>"']


def test_markup_passes_and_text_in_it_is_escaped() -> None:
    assert code("<y>") == "<code>&lt;y&gt;</code>"
    assert "<dt>&lt;x&gt;</dt><dd><code>&lt;y&gt;</code></dd>" in versions([("<x>", code("<y>"))])


def test_tables_escape_cells_and_align_numbers() -> None:
    rows = [["<1", "x", "", "", "<2", "", ""]]
    table = render("all_signals.html", rows=rows)
    assert "<td>&lt;1</td>" in table
    assert '<td class="num">&lt;2</td>' in table
    assert '<th class="num" scope="col">last</th>' in table


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("note.html", title="x", id="x")
