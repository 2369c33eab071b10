"""Text becomes markup only where it is meant to; numbers read well."""

import math

import pytest
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-1e-5, "−1.0×10⁻⁵"),
        (2.5e7, "2.5×10⁷"),
        (24.0, "24"),
        (-3.0, "−3"),
        (0.0134, "0.0134"),
        (1.776, "1.78"),
        (18.76, "18.8"),
        (-240.4, "−240"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert markup.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00 %"), (1e-9, "< 0.01 %"), (-1e-9, "> −0.01 %"), (0.0134, "1.3 %"), (-0.5, "−50.0 %"), (1.0, "100 %")],
)
def test_percent(value: float, text: str) -> None:
    assert markup.percent(value) == text


def test_durations_and_sizes() -> None:
    assert [markup.duration_text(s) for s in (0.0031, 61.0, 600.0, 9000.0, math.nan)] == [
        "3.1 ms",
        "61.0 s",
        "10 min",
        "2.5 h",
        "–",
    ]
    assert [markup.bytes_text(b) for b in (12, 2048, 5 << 20, 3 << 30)] == ["12 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]
