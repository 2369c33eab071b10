"""Where the page comes from: trace, process, versions, configuration, command line."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from mxprobe._version import __version__
from mxprobe.numbers import duration

from .inputs import Inputs
from .rendering import code, render

HOLDS = (
    "Sums, counts and histograms over tensors; names of modules, parameters and metrics; logged metric values; hashes "
    "of quantized weight codes; numbers of experts and features; the command lines of the job and of the attach, "
    "paths, versions and options, error messages of the probe. No prompt, completion, token, weight, activation or "
    "gradient. The page holds no more than the trace; both hold the command lines, which may hold a secret."
)
"""The page's own answer to whether it can be passed on; `tests/unit/test_security.py` holds the schema against it."""


def section(inputs: Inputs, command_line: str) -> Markup:
    """Return the card; `command_line` is the one that made the page."""
    entries: list[tuple[str, object]] = [("trace", inputs.name), ("report made by", f"mxprobe {__version__}")]
    if command_line:
        entries.append(("command", code(command_line)))
    return versions([*entries, *_run_entries(inputs.run), ("the trace holds", HOLDS)])


def versions(entries: Sequence[tuple[str, object]]) -> Markup:
    """Return a card of names and what they are."""
    return render("versions.html", entries=entries)


def _run_entries(run: Mapping[str, Any]) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    target: Any = run.get("target")
    if isinstance(target, Mapping):
        entries += [(f"target {key}", _text(value)) for key, value in target.items() if value not in (None, "")]
    for key, label in _PLAIN.items():
        if run.get(key) not in (None, ""):
            entries.append((label, _text(run[key])))
    for key, label in _TIMES.items():
        if isinstance(run.get(key), int):
            entries.append((label, f"{datetime.fromtimestamp(run[key] / 1e9, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"))
    ended: Any = run.get("ended")
    if isinstance(ended, Mapping) and ended.get("reason"):
        entries.append(("ended because", _text(ended["reason"])))
    for key in ("attach_latency_ms", "pause_ms"):
        value = run.get(key)
        if isinstance(value, (int, float)):
            entries.append((_MILLISECONDS[key], duration(value / 1000)))
    config: Any = run.get("config")
    if isinstance(config, Mapping):
        entries += [(f"probe {key}", _text(value)) for key, value in config.items()]
    return entries


_PLAIN = {
    "mxprobe": "trace written by mxprobe",
    "schema_version": "trace schema",
    "command_line": "attached by",
    "mechanism": "attached through",
    "role": "role of the process",
}
_TIMES = {"started_ns": "started", "created_ns": "trace created", "closed_ns": "trace closed"}
_MILLISECONDS = {"attach_latency_ms": "attach took", "pause_ms": "target paused for"}


def _text(value: Any) -> Markup:
    return code(" ".join(str(part) for part in value) if isinstance(value, (list, tuple)) else value)


def headline(inputs: Inputs, probed: npt.NDArray[np.int64]) -> list[str]:
    """Return short facts for the bar at the top: which steps, what ran."""
    columns = [frame["step"].dropna() for frame in (inputs.overhead, inputs.signals)]
    seen = [int(bound) for column in columns if len(column) for bound in (column.min(), column.max())]
    seen += [int(step) for step in probed[[0, -1]]] if len(probed) else []
    facts = [f"steps {min(seen)} to {max(seen)}"] if seen else ["no steps"]
    target: Any = inputs.run.get("target")
    if isinstance(target, Mapping) and target.get("cmdline"):
        words: Any = target["cmdline"]
        facts.append(_short_command(words) if isinstance(words, (list, tuple)) else str(words))
    return facts


def _short_command(words: Sequence[Any]) -> str:
    """Return the interpreter and the script by their names, the rest as it was."""
    return " ".join([PurePath(str(word)).name if i < 2 else str(word) for i, word in enumerate(words)])
