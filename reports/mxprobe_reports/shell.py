"""The page around the sections: one file, no request of any kind."""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from .rendering import asset, render

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


def page(
    title: str, facts: Sequence[str], sections: Sequence[Markup], data: dict[str, Any], *, controls: str = ""
) -> str:
    """Return the whole HTML document. `data` is what page.js explores; non-finite numbers in it are an error.

    `controls` go in the bar at the top, in place of the first fact, the range of steps.
    """
    plotly = get_plotlyjs()
    script = "\n".join(asset(f"assets/{name}") for name in SCRIPTS)
    body = Markup("\n").join(sections)
    policy = (
        "default-src 'none'; connect-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src {_hash(plotly)} {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return render(
        "page.html",
        policy=Markup(policy),
        title=title,
        css=Markup(asset("assets/page.css")),
        controls=controls,
        facts=facts,
        navigation=[(id, text) for id, text in NAVIGATION if f'id="{id}"' in body],
        body=body,
        data=embed(data),
        plotly=Markup(plotly),
        script=Markup(script),
    )


def write(path: Path, text: str) -> None:
    """Write a page to `path`, whole or not at all. OSError when the place cannot be written."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def embed(data: dict[str, Any]) -> Markup:
    """Return JSON that cannot end its script element, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
