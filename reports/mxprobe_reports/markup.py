"""HTML from text: what is not `Html` already is escaped, so that no name in a trace can become markup."""

import html
import math
from collections.abc import Sequence


class Html(str):
    """Text that is markup already."""

    def __add__(self, other: str) -> "Html":
        return Html(f"{self}{esc(other)}")


def esc(text: object) -> Html:
    """Escape for element content and for quoted attributes; `Html` passes through."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))


def join(parts: Sequence[object], separator: str = "") -> Html:
    return Html(separator.join(esc(part) for part in parts))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. `class_` and `for_` spell the reserved words; `data_x` becomes `data-x`; None is left out."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{esc(value)}"' for key, value in attributes.items() if value is not None
    )
    return Html(f"<{name}{rendered}>{join(children)}</{name}>")


def table(
    head: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    numeric: Sequence[int] = (),
    class_: str | None = None,
) -> Html:
    """A table in its own horizontal scroller. `numeric` are the right-aligned columns."""

    def cells(name: str, row: Sequence[object], **attributes: object) -> Html:
        return join(
            [tag(name, cell, class_="num" if i in numeric else None, **attributes) for i, cell in enumerate(row)]
        )

    body = join([tag("tr", cells("td", row)) for row in rows])
    header = tag("thead", tag("tr", cells("th", head, scope="col")))
    return tag("div", tag("table", header, tag("tbody", body), class_=class_), class_="scroll")


def basis(kind: str, detail: str = "") -> Html:
    """How a number came about: `measured`, `predicted` or `associated`."""
    return tag("span", f"{kind}{', ' if detail else ''}{detail}", class_=f"basis {kind}")


def link(id: str, text: object) -> Html:
    """To a section of the page."""
    return tag("a", text, href=f"#{id}")


def scope(*filters: str) -> Html:
    """Where page.js says which of the reader's filters (`steps`, `rank`, `operands`) a panel does not follow."""
    return tag("span", class_="scope", data_scope=" ".join(filters), hidden="hidden")


def card(
    title: object, *body: object, id: str | None = None, kind: object = "", controls: object = "", class_: str = ""
) -> Html:
    """A section of the page with its heading, the basis of its numbers and optional controls."""
    header = tag("header", tag("h2", title), controls, kind)
    return tag("section", header, *body, class_=f"card {class_}".strip(), id=id)


def chart(name: str, label: str, *, size: str = "tall", picks: str = "") -> Html:
    """A chart drawn when scrolled to, and its table, filled when opened. `name` is a key of CHARTS in page.js.

    `picks` says in words what the arrow keys select in it; such a chart is a stop of the Tab key.
    """
    keys = {"role": "img", "aria_label": label}
    if picks:
        keys = {"role": "application", "aria_label": f"{label}. {picks}.", "tabindex": "0", "aria_describedby": "keys"}
    figure = tag("div", id=f"chart-{name}", class_=f"chart {size}", data_chart=name, **keys)
    save = tag("button", "Save CSV", type="button", class_="plain")
    data = tag(
        "details",
        tag("summary", "Table"),
        save,
        tag("div", class_="scroll", tabindex="0"),
        class_="data",
        data_table=name,
    )
    return figure + data


def pairs(entries: Sequence[tuple[object, object]]) -> Html:
    return tag("dl", *[tag("dt", name) + tag("dd", value) for name, value in entries], class_="pairs")


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """Three significant digits, whole numbers as such, a true minus sign, a dash for what is not finite."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size < 1e6 and value == round(value):
        return f"{value:.0f}".replace("-", "−")
    if size < 1e-3 or size >= 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}".replace("-", "−")
    if size < 0.1:
        return f"{value:.3g}".replace("-", "−")
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    size = abs(100 * value)
    if 0 < size < 0.005:
        return "< 0.01 %" if value > 0 else "> −0.01 %"
    digits = 0 if size >= 99.95 else 1 if size >= 1 else 2
    return f"{100 * value:.{digits}f} %".replace("-", "−")


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def duration_text(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
