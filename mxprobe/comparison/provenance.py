"""What was different about the runs themselves: settings, versions, command lines, and what the layers really did."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxprobe.trace import Trace

from .alignment import Alignment

# Differ between any two runs and say nothing about them.
_VOLATILE = frozenset(
    {
        *("created_ns", "closed_ns", "started_ns", "writer_pid", "ended", "agent", "compacted_after_death"),
        *(
            "pause_ms",
            "attach_latency_ms",
            "kernels_ms",
            "attached_step",
            "command_line",
            "schema_version",
            "schema_minor",
        ),
        *("target.pid", "target.protocol", "target.cmdline"),
    }
)
_ABSENT = "not set"


@dataclass(frozen=True)
class ConfigChange:
    """One thing that differs. `origin` is `run.json`, `command line` or `measured` (inferred from layer outputs)."""

    name: str
    a: str
    b: str
    origin: str


def config_changes(a: Trace, b: Trace, alignment: Alignment) -> tuple[ConfigChange, ...]:
    """Recipes first, then the jobs' command lines, then versions and settings."""
    return (*_recipes(a, b, alignment), *_command_lines(a, b), *_run_facts(a, b))


def _recipes(a: Trace, b: Trace, alignment: Alignment) -> Iterator[ConfigChange]:
    """How x and W of the common modules were quantized, by phase."""
    for phase in alignment.phases:
        words = [_recipe_words(trace, phase, alignment) for trace in (a, b)]
        if words[0] != words[1]:
            yield ConfigChange(f"recipe in {phase}", words[0], words[1], "measured")


def _recipe_words(trace: Trace, phase: str, alignment: Alignment) -> str:
    rows = trace.outputs()
    rows = rows[(rows["phase"] == phase) & rows["module"].isin(list(alignment.modules))]
    last = rows.drop_duplicates("module", keep="last")
    pairs = zip(last["recipe_x"].astype(str), last["recipe_w"].astype(str), strict=True)
    counts = Counter(x if x == w else f"x {x}, W {w}" for x, w in pairs)
    return "; ".join(f"{recipe} in {count}" for recipe, count in counts.most_common()) or "not seen"


def _command_lines(a: Trace, b: Trace) -> Iterator[ConfigChange]:
    options = [_options(trace.run.get("target", {}).get("cmdline", [])) for trace in (a, b)]
    for name in dict.fromkeys((*options[0], *options[1])):
        values = [each.get(name, _ABSENT) for each in options]
        if values[0] != values[1]:
            yield ConfigChange(name, values[0], values[1], "command line")


def _options(command_line: Any) -> dict[str, str]:
    """`--name value`, `--name=value` and `-n value` by name; the words between them by position."""
    found: dict[str, str] = {}
    words = [str(word) for word in command_line] if isinstance(command_line, list) else []
    name = ""
    n_positional = 0
    for word in words:
        if word.startswith("-") and not word.lstrip("-").replace(".", "").isdecimal():
            name, equals, value = word.partition("=")
            found[name] = value if equals else "given"
            name = "" if equals else name
        elif name:
            found[name], name = word, ""
        else:
            found[f"argument {n_positional}"] = word
            n_positional += 1
    return found


def _run_facts(a: Trace, b: Trace) -> Iterator[ConfigChange]:
    facts = [dict(_flat(trace.run)) for trace in (a, b)]
    for name in dict.fromkeys((*facts[0], *facts[1])):
        values = [each.get(name, _ABSENT) for each in facts]
        if values[0] != values[1]:
            yield ConfigChange(name, values[0], values[1], "run.json")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if name in _VOLATILE:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list):
            yield name, ", ".join(str(item) for item in value)
        else:
            yield name, str(value)
