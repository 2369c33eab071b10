"""The selected layer and the table of all layers; page.js fills both."""

from .markup import Html, basis, card, chart, scope, tag
from .names import ROLE_LABELS
from .operands import Operands

_COLUMNS: tuple[tuple[str, str], ...] = (
    ("module", "module"),
    ("role", "operand"),
    ("out_error", "output error"),
    ("out_zeroed", "on zeroed"),
    ("nmse", "operand error"),
    ("sqnr_db", "SQNR"),
    ("scale", "scale"),
    ("deadzone", "deadzone"),
    ("grid", "grid"),
    ("zero_frac", "zeroed"),
    ("saturated_frac", "clipped"),
)


def selected(operands: Operands) -> Html:
    """The panel that follows the selection; the empty page has none."""
    if not len(operands.totals):
        return Html("")
    options = [tag("option", name, value=i) for i, name in enumerate(operands.modules)]
    choose = tag("select", *options, id="layer-select", aria_label="Layer")
    steps = [
        tag("button", "‹ previous", type="button", class_="plain", id="layer-previous"),
        tag("button", "next ›", type="button", class_="plain", id="layer-next"),
    ]
    radios = [
        tag("label", Html(f'<input type="radio" name="operand" id="operand-{role}">'), ROLE_LABELS[role])
        for role in operands.roles
    ]
    operand = tag("fieldset", tag("legend", "Operand", class_="sr"), *radios, class_="segments")
    controls = tag("div", choose, *steps, operand, class_="controls", style="margin-top: 8px")
    charts = tag("div", *[_figure(*figure) for figure in _FIGURES], class_="charts")
    keys = tag("dl", id="keys", class_="keys", aria_live="polite")
    body = [controls, keys, charts, _whatifs(), _resampled(operands)]
    return card("Selected layer", *body, id="layer", kind=basis("measured"), class_="long")


_FIGURES: tuple[tuple[str, str, str], ...] = (
    ("output", "Output error of its GEMM over steps", "relative to ‖output‖²; the parts add to the total"),
    ("operand", "Error of the operand over steps", "relative to ‖x‖²; the parts add to the total"),
    ("zeros", "Values lost to zero or clipped", "share of non-zero values"),
    ("delta", "How far scales are from ideal", "share of blocks"),
)


def _figure(name: str, title: str, detail: str) -> Html:
    follows = [] if name != "delta" else [" ", scope("steps", "rank")]
    caption = tag("figcaption", title, *follows, tag("div", detail, class_="note"))
    return tag("figure", caption, chart(name, f"{title}, {detail}"))


def _whatifs() -> Html:
    head = ["correction", "output error left", "operand error left", "left on the deadzone", "zeroed values"]
    cells = [tag("th", text, scope="col", class_="num" if i else None) for i, text in enumerate(head)]
    content = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", id="whatifs"))
    title = tag(
        "h3",
        "What-ifs on this operand, relative to the uncorrected quantizer ",
        basis("measured"),
        scope("steps", "rank"),
        style="margin-top: 10px",
        id="whatifs-title",
    )
    return title + tag("div", content, class_="scroll")


def _resampled(operands: Operands) -> Html:
    if not operands.is_downsampled:
        return Html("")
    text = (
        f"For display, {operands.n_probed_steps} probed steps are added up into {len(operands.binned.steps)} bins, "
        "each drawn at its first step. All other numbers use every step, and the trace holds them all."
    )
    return tag("p", text, class_="note", style="margin-top: 8px")


_GROUPS = (("fwd", "forward"), ("dgrad", "dgrad"), ("wgrad", "wgrad"))


def range_controls(operands: Operands) -> Html:
    """For the bar at the top: which steps, rank and operands the page shows."""
    steps = operands.binned.steps
    parts: list[object] = []
    if len(steps) > 1:
        first, last = int(steps[0]), int(steps[-1])
        bounds = f'min="{first}" max="{last}" step="1" inputmode="numeric"'
        parts += [
            "steps ",
            Html(f'<input type="number" id="step-from" value="{first}" {bounds} aria-label="First step shown">'),
            " to ",
            Html(f'<input type="number" id="step-to" value="{last}" {bounds} aria-label="Last step shown">'),
            tag("button", "all", type="button", class_="plain", id="steps-all", hidden="hidden"),
        ]
    if len(operands.roles) > 1:
        groups = [g for g in _GROUPS if 1 < sum(r.endswith(g[0]) for r in operands.roles) < len(operands.roles)]
        options = [tag("option", "all operands", value="")]
        options += [tag("option", text, value=end) for end, text in groups]
        options += [tag("option", ROLE_LABELS[role], value=role) for role in operands.roles]
        parts.append(tag("select", *options, id="operand-filter", aria_label="Operands shown"))
    if operands.ranks:
        options = [tag("option", each.label, value=i) for i, each in enumerate((operands.binned, *operands.ranks))]
        parts.append(tag("select", *options, id="rank-select", aria_label="Rank shown"))
    if not parts:
        return Html("")
    return tag("div", *parts, class_="range", role="group", aria_label="Steps, rank and operands shown")


def all_layers(operands: Operands) -> Html:
    if not len(operands.totals):
        return Html("")
    search = '<input type="search" id="layer-filter" placeholder="Filter by name" aria-label="Filter layers by name">'
    controls = tag(
        "div",
        Html(search),
        tag("span", id="layers-count", class_="note", aria_live="polite"),
        class_="controls",
    )
    head = [
        tag("th", tag("button", text, type="button"), scope="col", data_key=key, class_="num" if i > 1 else None)
        for i, (key, text) in enumerate(_COLUMNS)
    ]
    content = tag("table", tag("thead", tag("tr", *head)), tag("tbody", id="layers"), id="layers-table")
    more = tag("button", "Show all", type="button", class_="plain", id="layers-more", hidden="hidden")
    note = tag(
        "p",
        "Scale, deadzone and grid are the remainder split of the operand's error and add to 100 %; a negative scale "
        "share means no scale problem.",
        class_="note",
    )
    body = [tag("div", content, class_="scroll"), more, note]
    kind = basis("measured")
    return card("All layers", *body, id="layers-card", controls=controls, kind=kind, class_="long")
