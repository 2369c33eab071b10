"""The page around the sections: one file, no request of any kind."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from .markup import Html, esc, join, tag

SCRIPTS = ("numbers.js", "data.js", "charts.js", "page.js")

NAVIGATION = (
    ("against", "B against A"),
    ("signals", "Signals"),
    ("error", "Error"),
    ("help", "Corrections"),
    ("layer", "Layer"),
    ("layers-card", "All layers"),
    ("realised", "Realised"),
    ("depth", "Depth"),
    ("experts", "Experts"),
    ("claims", "Claims"),
    ("coverage", "Coverage"),
    ("quality", "Quality"),
    ("methods", "Methods"),
)


def render(title: str, facts: Sequence[str], body: Html, data: dict[str, Any], *, controls: Html) -> str:
    """The whole HTML document. `data` is what page.js explores; non-finite numbers in it are an error.

    `controls` go in the bar at the top, in place of the first fact, the range of steps.
    """
    plotly = get_plotlyjs()
    code = "\n".join(asset(name) for name in SCRIPTS)
    policy = (
        "default-src 'none'; connect-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src {_hash(plotly)} {_hash(code)}; base-uri 'none'; form-action 'none'"
    )
    present = join([tag("a", text, href=f"#{id}") for id, text in NAVIGATION if f'id="{id}"' in body])
    said = [tag("span", fact, title=fact) for fact in facts]
    if "step-from" in controls:
        said[0] = tag("span", facts[0], class_="print-only")
    run = tag("div", tag("b", title, title=title), controls, *said, class_="run")
    top = tag(
        "header",
        tag("div", tag("span", "mxprobe", class_="brand"), run, tag("nav", present, aria_label="Sections")),
        class_="top",
    )
    without = (
        "<noscript><p class=card>Charts and the layer explorer need JavaScript; the tables below do not.</p></noscript>"
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{esc(title)} · mxprobe report</title>"
        f"<style>{asset('page.css')}</style></head>\n"
        f'<body><a class="skip" href="#main">Skip to the verdict</a>{top}\n<main id="main">{without}{body}</main>\n'
        f'<script type="application/json" id="data">{embed(data)}</script>\n'
        f"<script>{plotly}</script>\n<script>{code}</script></body></html>\n"
    )


def embed(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    return (files("mxprobe_reports") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
