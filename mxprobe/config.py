"""The keys of `mxprobe.toml`, their defaults, and where each effective value came from.

    default < pyproject.toml [tool.mxprobe] < mxprobe.toml < environment MXPROBE_SECTION_KEY < command line

The nearest directory upwards that holds either file is used; `--config FILE` names one instead. Keys are in three
sections: `[attach]` (defaults of `mxprobe attach`), `[verdict]` (thresholds of the verdict) and `[check]` (limits of
`mxprobe check`), the last with overrides per module, `[check.layers."GLOB"]`. An unknown key is an error.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxprobe.errors import UsageError
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role, Verdict
from mxprobe_kernels.formats import Rule

if TYPE_CHECKING:
    from mxprobe.attribution import Thresholds

CONFIG_FILE = "mxprobe.toml"
PYPROJECT_FILE = "pyproject.toml"
SECTIONS = ("attach", "verdict", "check")
COMMAND_LINE = "command line"
DEFAULT = "default"
_LAYERS = "layers"
_AGENT = AgentConfig()

_WANTED = {
    "int": "a whole number of 0 or more",
    "float": "a number of 0 or more",
    "str": "a text",
    "list": "a list of texts",
}

Value = int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class Key:
    """One setting. `kind` is int, float, str or list (of strings); None as a default means "not set"."""

    section: str
    name: str
    kind: str
    default: Value
    help: str
    per_module: bool = False
    """Whether `[check.layers."GLOB"]` may override it."""
    choices: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"MXPROBE_{self.section}_{self.name}".upper()

    def parse(self, value: Any, where: str) -> Value:
        """`value` from TOML, or text from the environment or the command line. UsageError says what was wanted."""
        parsed = self._from_text(value) if isinstance(value, str) else self._from_toml(value)
        if parsed is None:
            raise UsageError(f"{where}: {self.path} = {value!r} is not {_WANTED[self.kind]}")
        items = parsed if isinstance(parsed, tuple) else (parsed,)
        for item in items if self.choices else ():
            if item not in self.choices:
                raise UsageError(
                    f"{where}: {self.path} does not know {item!r}{_nearest(str(item), self.choices)}",
                    remedy=f"use one of: {', '.join(self.choices)}",
                )
        return parsed

    def _from_text(self, text: str) -> Value:
        if self.kind == "str":
            return text
        if self.kind == "list":
            return tuple(part.strip() for part in text.split(",") if part.strip())
        try:
            return self._from_toml(int(text) if self.kind == "int" else float(text))
        except ValueError:
            return None

    def _from_toml(self, value: Any) -> Value:
        if self.kind == "list":
            ok = isinstance(value, list) and all(isinstance(item, str) for item in value)
            return tuple(value) if ok else None
        if isinstance(value, bool) or not isinstance(value, int if self.kind == "int" else (int, float)):
            return None
        if not (math.isfinite(value) and value >= 0):
            return None
        return value if self.kind == "int" else float(value)


def _attach(name: str, kind: str, default: Value, help: str, choices: tuple[str, ...] = ()) -> Key:
    return Key("attach", name, kind, default, help, choices=choices)


def _check(name: str, kind: str, help: str, *, per_module: bool = False, choices: tuple[str, ...] = ()) -> Key:
    return Key("check", name, kind, None, help, per_module, choices)


_ATTACH_KEYS = (
    _attach("every", "int", _AGENT.every, "probe every N-th step"),
    _attach("weights_every", "int", _AGENT.weights_every, "decompose the weights every N-th step"),
    _attach("sensitivity_every", "int", _AGENT.sensitivity_every, "replay a microbatch for sensitivities; 0: never"),
    _attach("replay_every", "int", _AGENT.replay_every, "replay a microbatch under other roundings; 0: never"),
    _attach("layers", "list", _AGENT.layers, "globs over module names to probe"),
    _attach("rollout_in", "list", _AGENT.rollout_in, "functions that run while the job generates"),
    _attach("rule", "str", _AGENT.rule, "scale rule errors are measured for", tuple(rule.value for rule in Rule)),
    _attach("max_overhead", "float", None, "share of the step time that the probe may cost; 0: no limit"),
    _attach("max_gpu_memory", "int", _AGENT.max_gpu_memory, "bytes of the GPU that the probe may take; 0: no limit"),
    _attach("step_timeout", "float", _AGENT.step_timeout_s, "seconds to wait for a first step"),
)
_CHECK_KEYS = (
    _check("max_nmse", "float", "error of a tensor, ||Q(x) - x||^2 / ||x||^2", per_module=True),
    _check("max_output_error", "float", "error one operand puts into its GEMM's output, squared", per_module=True),
    _check("max_zero_frac", "float", "share of non-zero elements rounded to zero", per_module=True),
    _check("max_saturated_frac", "float", "share of elements beyond the largest value", per_module=True),
    _check("max_realised_error", "float", "measured output error of a module, any phase, squared", per_module=True),
    _check("roles", "list", "operands that the limits apply to; all if not set", choices=tuple(r.value for r in Role)),
    _check("max_mismatch", "float", "median |realised error in rollout - in training|"),
    _check("max_nonfinite", "int", "infinite or NaN elements met, all operands together"),
    _check("min_coverage", "float", "share of forward GEMM FLOPs that was probed"),
    _check("min_steps", "int", "probed steps"),
    _check("max_overhead", "float", "share of the step time spent in the probe"),
    _check("max_dropped", "int", "rows given up because the queue was full"),
    _check("allow_verdicts", "list", "verdicts that pass", choices=tuple(v.value for v in Verdict)),
)


@cache
def _verdict_keys() -> tuple[Key, ...]:
    from mxprobe.attribution.thresholds import Thresholds

    kinds = {int: "int", float: "float", str: "str"}
    return tuple(Key("verdict", name, kinds[type(value)], value, "") for name, value in asdict(Thresholds()).items())


def keys_of(section: str) -> tuple[Key, ...]:
    """The keys of a section, in the order they are shown."""
    if section == "verdict":
        return _verdict_keys()
    return _ATTACH_KEYS if section == "attach" else _CHECK_KEYS


@dataclass(frozen=True)
class Setting:
    """An effective value and its source: `default`, a file's path, an environment variable, `command line`."""

    key: Key
    value: Value
    source: str


@dataclass(frozen=True)
class LayerOverride:
    """Limits for the modules whose name matches `glob`; of several, a later one wins key by key."""

    glob: str
    limits: dict[str, float]
    source: str


@dataclass(frozen=True)
class Settings:
    """What is in force, with sources."""

    settings: tuple[Setting, ...]
    overrides: tuple[LayerOverride, ...]
    files: tuple[Path, ...]

    def section(self, name: str) -> dict[str, Value]:
        """Key -> value of one section."""
        return {each.key.name: each.value for each in self.settings if each.key.section == name}

    def thresholds(self) -> Thresholds:
        """`[verdict]` as the verdict engine takes it."""
        from mxprobe.attribution.thresholds import Thresholds

        return Thresholds().replace(**self.section("verdict"))

    def command_defaults(self, section: str) -> dict[str, Any]:
        """What click should take as defaults of that command: the values that something set."""
        chosen = [each for each in self.settings if each.key.section == section and each.source != DEFAULT]
        return {each.key.name: list(each.value) if isinstance(each.value, tuple) else each.value for each in chosen}


def load(
    *,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    sections: Sequence[str] = SECTIONS,
    start: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read files and environment.

    Args:
        config: this file instead of those found from `start` (default: the working directory) upwards.
        assignments: `section.key=value` from the command line; without a section, the last that has such a key.
        sections: those to read; the others are not looked at.
        environ: default `os.environ`.

    Raises:
        UsageError: unreadable file, unknown key (with the nearest known one), value of the wrong kind.
    """
    files = _found(start or Path.cwd()) if config is None else (config,)
    known = {key.path: key for section in sections for key in keys_of(section)}
    settings = {path: Setting(key, key.default, DEFAULT) for path, key in known.items()}
    overrides: list[LayerOverride] = []
    used: list[Path] = []
    for file in files:
        data = _read(file)
        if data is None:
            continue
        used.append(file)
        _check_sections(data, file)
        for section in sections:
            table = data.get(section, {})
            if not isinstance(table, dict):
                raise UsageError(f"{file}: {section} is not a table", remedy=f"write [{section}] and keys below it")
            for name, value in table.items():
                if section == "check" and name == _LAYERS:
                    overrides = [*overrides, *_overrides(value, file)]
                    continue
                key = _key(section, name, str(file))
                settings[key.path] = Setting(key, key.parse(value, str(file)), str(file))
    for key, text in _from_environment(os.environ if environ is None else environ, sections):
        settings[key.path] = Setting(key, key.parse(text, key.variable), f"environment {key.variable}")
    for assignment in assignments:
        key, text = _assignment(assignment, sections)
        settings[key.path] = Setting(key, key.parse(text, COMMAND_LINE), COMMAND_LINE)
    return Settings(tuple(settings.values()), tuple(overrides), tuple(used))


def _found(start: Path) -> tuple[Path, ...]:
    """The two files of the nearest directory that has one with settings, pyproject first: the later one wins."""
    for directory in (start.absolute(), *start.absolute().parents):
        here = [path for name in (PYPROJECT_FILE, CONFIG_FILE) if (path := directory / name).is_file()]
        if any(path.name == CONFIG_FILE or _read(path) is not None for path in here):
            return tuple(here)
    return ()


def _read(file: Path) -> dict[str, Any] | None:
    """The settings in a file; None for a pyproject.toml without any."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror or error}", remedy="name another file with --config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}", remedy="correct that line") from None
    if file.name != PYPROJECT_FILE:
        return data
    table = data.get("tool", {}).get("mxprobe")
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{file}: tool.mxprobe is not a table", remedy="write [tool.mxprobe.check] and keys below it")
    return table


def _check_sections(data: dict[str, Any], file: Path) -> None:
    for name in data:
        if name not in SECTIONS:
            raise UsageError(
                f"{file}: unknown section [{name}]{_nearest(name, SECTIONS)}",
                cause="a key outside of a section" if not isinstance(data[name], dict) else "a typing error",
                remedy=f"use one of: {', '.join(f'[{section}]' for section in SECTIONS)}",
            )


def _key(section: str, name: str, where: str, *, per_module: bool = False) -> Key:
    candidates = {key.name: key for key in keys_of(section) if key.per_module or not per_module}
    if name in candidates:
        return candidates[name]
    place = f'{section}.layers."…"' if per_module else section
    raise UsageError(
        f"{where}: unknown key {name!r} in [{place}]{_nearest(name, candidates)}",
        cause="a typing error, or a limit that is not per module" if per_module else "a typing error",
        remedy=f"known keys: {', '.join(candidates)}",
    )


def _overrides(table: Any, file: Path) -> list[LayerOverride]:
    if not isinstance(table, dict) or not all(isinstance(limits, dict) for limits in table.values()):
        raise UsageError(
            f"{file}: check.layers does not map globs to limits",
            remedy='write for example [check.layers."*.down_proj"] and max_nmse = 0.03 below it',
        )
    found: list[LayerOverride] = []
    for glob, limits in table.items():
        parsed: dict[str, float] = {}
        for name, value in limits.items():
            number = _key("check", name, str(file), per_module=True).parse(value, f"{file}, {glob}")
            if isinstance(number, (int, float)):  # per-module keys are all numbers
                parsed[name] = float(number)
        found.append(LayerOverride(glob, parsed, str(file)))
    return found


def _from_environment(environ: Mapping[str, str], sections: Sequence[str]) -> Iterator[tuple[Key, str]]:
    for variable, text in sorted(environ.items()):
        for section in sections:
            prefix = f"MXPROBE_{section}_".upper()
            if variable.startswith(prefix):
                yield _key(section, variable.removeprefix(prefix).lower(), f"environment {variable}"), text


def _assignment(text: str, sections: Sequence[str]) -> tuple[Key, str]:
    path, equals, value = text.partition("=")
    section, dot, name = path.strip().rpartition(".")
    if not equals or not name:
        raise UsageError(f"{text!r} is not an assignment", remedy="write --set KEY=VALUE, e.g. --set max_nmse=0.02")
    if not dot:
        having = [each for each in sections if any(name == key.name for key in keys_of(each))]
        section = (having or list(sections))[-1]
    if section not in sections:
        raise UsageError(f"no section {section!r} here{_nearest(section, sections)}", remedy=", ".join(sections))
    return _key(section, name, COMMAND_LINE), value.strip()


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
