"""How numbers are written for people: one spelling for the terminal, the report and its page script.

`assets/numbers.js` of the report spells `number`, `percent` and `power` for the page script, digit for digit like this
module; a test compares them over 10,000 values. Both round the exact binary value, ties away from zero. A minus is a
true minus sign; what is not finite, or None, is a dash.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal

NOTHING = "–"
_EXACT = Context(prec=400, rounding=ROUND_HALF_UP)
_THREE, _TWO = (Context(prec=digits, rounding=ROUND_HALF_UP) for digits in (3, 2))
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None) -> str:
    """Three significant digits: `24`, `0.0134`, `1.78`, `12346`, `1.0×10⁻⁵`.

    Whole numbers below a million are written as such. Below 0.1 trailing zeros are dropped. Below 0.001, and from a
    million, two digits and a power of ten.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    size, sign = abs(value), "−" if value < 0 else ""
    if size < 1e6 and size == round(size):
        return f"{sign}{size:.0f}"
    exponent = _THREE.create_decimal(Decimal(size)).adjusted()
    if exponent < -3 or exponent >= 6:
        rounded = _TWO.create_decimal(Decimal(size))
        return f"{sign}{rounded.scaleb(-rounded.adjusted()):.1f}×{power(rounded.adjusted())}"
    text = _rounded(size, max(2 - exponent, 0))
    return sign + (text.rstrip("0") if exponent < -1 else text)


def signed(value: float) -> str:
    """Like `number`, with a plus before what is above zero."""
    return f"{'+' if value > 0 and math.isfinite(value) else ''}{number(value)}"


def percent(share: float | None) -> str:
    """A share in percent: `100 %`, `45.3 %`, `0.25 %`, `< 0.01 %`."""
    if share is None or not math.isfinite(share):
        return NOTHING
    size = abs(100 * share)
    if 0 < size < 0.005:
        return "< 0.01 %" if share > 0 else "> −0.01 %"
    text = number(size) if size >= 99.95 else _rounded(size, 1 if size >= 0.995 else 2)
    return f"{'−' if share < 0 else ''}{text} %"


def whole_percent(share: float | None) -> str:
    """A share in whole percent, for sentences: `93 %`."""
    return NOTHING if share is None or not math.isfinite(share) else f"{fixed(100 * share, 0)} %"


def fixed(value: float | None, digits: int = 2) -> str:
    """So many digits after the point; two are what the uncertainty of a gain allows."""
    if value is None or not math.isfinite(value):
        return NOTHING
    text = _rounded(abs(value), digits)
    return f"{'−' if value < 0 and Decimal(text) else ''}{text}"


def interval(value: float, low: float, high: float, spell: Callable[[float], str] = number) -> str:
    """`0.71 [0.64, 0.77]`; without the bracket where an end is not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return spell(value)
    return f"{spell(value)} [{spell(low)}, {spell(high)}]"


def p_value(value: float) -> str:
    """A probability of a test: `0.0166`, `< 0.001`."""
    return "< 0.001" if value < 1e-3 else number(value)


def power(exponent: int) -> str:
    """`10⁻³`."""
    return f"10{str(exponent).translate(_SUPERSCRIPT)}"


def file_size(n_bytes: float) -> str:
    """`12 B`, `2.0 KiB`, up to GiB."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        n_bytes /= 1024
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} GiB"


def duration(seconds: float) -> str:
    """`3.1 ms`, `61.0 s`, `10 min`, `2.5 h`."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _rounded(size: float, digits: int) -> str:
    return str(Decimal(size).quantize(Decimal((0, (1,), -digits)), context=_EXACT))
