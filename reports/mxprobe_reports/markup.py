"""HTML from text: what is not `Html` already is escaped, so that no name in a trace can become markup."""

import html
from collections.abc import Sequence

from mxprobe.numbers import duration as duration_text  # noqa: F401
from mxprobe.numbers import file_size as bytes_text  # noqa: F401
from mxprobe.numbers import number as number
from mxprobe.numbers import percent as percent


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
