"""Numbers read well, and the page script spells them as Python does."""

import json
import math
import shutil
import subprocess

import pytest

from mxprobe import numbers
from tests.spelled_numbers import SCRIPT, SPELL, spelled, values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (-1e-5, "−1.0×10⁻⁵"),
        (9.96e-4, "1.0×10⁻³"),
        (2.5e7, "2.5×10⁷"),
        (999_999.7, "1.0×10⁶"),
        (3.0, "3"),
        (24.0, "24"),
        (-3.0, "−3"),
        (0.0134, "0.0134"),
        (0.09996, "0.100"),
        (1.776, "1.78"),
        (9.996, "10.0"),
        (18.76, "18.8"),
        (-240.4, "−240"),
        (12345.6, "12346"),
        (math.nan, "–"),
        (math.inf, "–"),
        (None, "–"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert numbers.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 %"),
        (1e-9, "< 0.01 %"),
        (-1e-9, "> −0.01 %"),
        (0.00996, "1.0 %"),
        (0.0134, "1.3 %"),
        (0.3125, "31.3 %"),
        (-0.5, "−50.0 %"),
        (1.0, "100 %"),
        (1e9, "1.0×10¹¹ %"),
        (None, "–"),
    ],
)
def test_percent(value: float | None, text: str) -> None:
    assert numbers.percent(value) == text


def test_whole_percent_fixed_and_intervals() -> None:
    assert [numbers.whole_percent(x) for x in (0.93, -0.125, math.nan, None)] == ["93 %", "−13 %", "–", "–"]
    assert (numbers.whole_percent(-0.001), numbers.fixed(-0.004)) == ("0 %", "0.00")  # no minus before a zero
    assert [numbers.fixed(x) for x in (-0.125, 2.0, math.inf)] == ["−0.13", "2.00", "–"]
    assert numbers.interval(0.71, 0.64, 0.77, numbers.fixed) == "0.71 [0.64, 0.77]"
    assert numbers.interval(0.71, -math.inf, math.inf) == "0.710"
    assert [numbers.signed(x) for x in (0.4, -0.4, 0.0, math.nan)] == ["+0.400", "−0.400", "0", "–"]


def test_durations_and_sizes() -> None:
    assert [numbers.duration(s) for s in (0.0031, 61.0, 600.0, 9000.0, math.nan)] == [
        "3.1 ms",
        "61.0 s",
        "10 min",
        "2.5 h",
        "–",
    ]
    assert [numbers.file_size(b) for b in (12, 2048, 5 << 20, 3 << 30)] == ["12 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; Chromium does the same in the browser tests")
def test_node_spells_ten_thousand_values_alike() -> None:
    given = values()
    code = f"{SCRIPT.read_text(encoding='utf-8')}\nconsole.log(JSON.stringify(({SPELL})({json.dumps(given)})))"
    done = subprocess.run(["node"], input=code, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == spelled(given)
