"""The picture: symptoms, top layers by output error, overhead and drops; and the same as one plain line."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mxprobe.attribution.trends import mann_kendall
from mxprobe.numbers import number, percent
from mxprobe.printable import printable

from .controls import HELP, Controls
from .state import METRICS, MISMATCH, LiveState

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_TREND_POINTS = 120
_COMPONENT_STYLE = {"scale": "#e69f00", "deadzone": "#56b4e9", "grid": "#8fae94", "saturation": "#d55e00"}
_LAYER_COLUMNS = (
    # column, title, alignment, terminal width from which it is shown
    ("module", "module", "left", 0),
    ("role", "operand", "left", 0),
    ("output_error", "output error", "right", 0),
    ("zeros", "zeros", "right", 0),
    ("component", "mostly", "left", 70),
    ("rollout", "in rollout", "right", 84),
    ("train", "in training", "right", 98),
)
_COLUMN_GAP = 3
_SHORTEST_NAME = 12
NEGLIGIBLE = 1e-6
"""A realised error below it is arithmetic, not quantization."""
_FIXED_LINES = 7
"""Lines of the picture beside the rows of its tables."""
_LAYERS_BEFORE_EVENTS = 5
"""Rows of operands that a short terminal shows before it shows events."""


def render(
    state: LiveState,
    controls: Controls,
    *,
    name: str,
    status: str,
    width: int,
    height: int,
    ascii_only: bool = False,
) -> RenderableType:
    """Draw the whole picture, in at most `height` lines where that leaves room for one row."""
    symptoms = _symptoms(state, width, ascii_only=ascii_only)
    layers = select_layers(state.layer_table(), controls)
    spare = height - _FIXED_LINES - symptoms.row_count
    events = list(state.events)[max(len(state.events) - max(spare - _LAYERS_BEFORE_EVENTS, 0), 0) :]
    room = max(spare - len(events), 1)
    controls.offset = min(controls.offset, max(len(layers) - room, 0))
    shown = layers.iloc[controls.offset : controls.offset + room]
    lines: list[RenderableType] = [_title(state, controls, name, status), symptoms, _layers(shown, controls, width)]
    lines += [Text(printable(event), style="dim", no_wrap=True, overflow="ellipsis") for event in events]
    lines.append(_footer(state, controls, len(layers)))
    return Group(*lines)


def plain_line(state: LiveState) -> str:
    """Return one line for logs and pipes: no colour, no cursor movement."""
    parts = [f"step {state.last_step}"]
    for metric, words in (*METRICS[:2], (MISMATCH, "mismatch")):
        points = state.series.get(metric)
        if points:
            parts.append(f"{words} {number(next(reversed(points.values())))}")
    layers = select_layers(state.layer_table(), Controls())
    if len(layers):
        worst = layers.iloc[0]
        parts.append(f"worst {worst['module']} {worst['role']} {number(worst['output_error'])}")
    parts.append(f"overhead {percent(state.overhead_frac)}")
    parts.append(f"dropped {state.n_dropped}")
    if state.n_errors:
        parts.append(f"errors {state.n_errors}")
    return "  ".join(printable(part) for part in parts)


def select_layers(table: pd.DataFrame, controls: Controls) -> pd.DataFrame:
    """Return the rows that the filter lets through (a part of the name, or a glob), in the chosen order."""
    if table.empty:
        return table
    wanted = controls.filter if controls.typing is None else controls.typing
    if wanted:
        glob = wanted if any(c in wanted for c in "*?[") else f"*{wanted}*"
        labels = table["module"] + " " + table["role"]
        keep = [wanted in label or fnmatchcase(label, glob) for label in labels]
        table = table[keep]
    ascending = (controls.sort == "module") != controls.reverse
    return table.sort_values(controls.sort, ascending=ascending, kind="stable", na_position="last")


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Draw the last values, pooled into `width` means, between their own minimum and maximum."""
    data = np.asarray(values, dtype=float)
    data = data[np.isfinite(data)]
    if not data.size or width < 1:
        return ""
    if data.size > width:
        edges = np.linspace(0, data.size, width + 1).astype(int)
        data = np.array([data[a:b].mean() for a, b in pairwise(edges)])
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = float(data.min()), float(data.max())
    if high <= low:
        return bars[0] * data.size
    return "".join(bars[round((value - low) / (high - low) * (len(bars) - 1))] for value in data)


def _title(state: LiveState, controls: Controls, name: str, status: str) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis")
    if controls.is_paused:
        title.append("PAUSED", style="bold reverse")
        title.append("  ")
    title.append("mxprobe live", style="bold")
    title.append(f"  {printable(name)}")
    step = "no step yet" if state.last_step is None else f"step {state.last_step}"
    rate = "" if state.steps_per_s is None else f" · {state.steps_per_s:.2g} steps/s"
    title.append(f"  {step}{rate} · {status}")
    return title


def _symptoms(state: LiveState, width: int, *, ascii_only: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("symptom", no_wrap=True)
    table.add_column("now", justify="right", no_wrap=True)
    table.add_column("trend", no_wrap=True)
    bars = max(min(width - 40, 60), 0)
    if bars:
        table.add_column("", no_wrap=True)
    order = (*METRICS[:2], (MISMATCH, "mismatch of layers"), *METRICS[2:])
    for metric, words in order:
        points = state.series.get(metric)
        if not points:
            continue
        values = list(points.values())
        trend = mann_kendall(values[-_TREND_POINTS:])
        cells = [words, number(values[-1]), trend.direction() if trend else ""]
        table.add_row(*cells, *([sparkline(values, bars, ascii_only=ascii_only)] if bars else []))
    return table


def _layers(rows: pd.DataFrame, controls: Controls, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    mark = "^" if controls.reverse != (controls.sort == "module") else "v"
    shown = [column for column in _LAYER_COLUMNS if width >= column[3]]
    room = width - sum(max(len(title) + 2, 7) + _COLUMN_GAP for key, title, *_ in shown if key != "module")
    for key, title, justify, _ in shown:
        label = f"{title} {mark}" if key == controls.sort else title
        is_name = key == "module"
        table.add_column(
            label,
            justify="right" if justify == "right" else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if is_name else None,
            min_width=_SHORTEST_NAME if is_name else None,
        )
    table.expand = True
    for record in rows.to_dict("records"):
        record["module"] = _tail(printable(str(record["module"])), max(room, _SHORTEST_NAME))
        table.add_row(*(_cell(key, record[key]) for key, *_ in shown))
    return table


def _cell(key: str, value: object) -> str:
    if key == "component":
        style = _COMPONENT_STYLE.get(str(value))
        return f"[{style}]{value}[/]" if style else str(value)
    if isinstance(value, float):
        if key in ("rollout", "train") and value < NEGLIGIBLE:
            return "exact"
        return percent(value) if key == "zeros" else number(value)
    return escape(printable(str(value)))


def _footer(state: LiveState, controls: Controls, n_layers: int) -> Text:
    if controls.typing is not None:
        return Text(
            f"filter: {printable(controls.typing)}_   (enter applies, escape leaves)", style="bold", no_wrap=True
        )
    parts = [f"overhead {percent(state.overhead_frac)}", f"dropped {state.n_dropped}", f"errors {state.n_errors}"]
    if state.coverage is not None:
        parts.append(f"GEMM work seen {percent(state.coverage)}")
    parts.append(f"{n_layers} operands" + (f" matching {controls.filter!r}" if controls.filter else ""))
    footer = Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
    if not controls.is_shown_once:
        footer.append(f"\n{HELP}", style="dim")
    return footer


def _tail(name: str, width: int) -> str:
    """Shorten a long name to its end: the layers differ there, and in the number before it."""
    return name if len(name) <= width else f"…{name[1 - width :]}"
