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
_KEYS_FILE = Path(__file__).with_name("config_keys.toml")
_CHOICES = {kind.__name__: [each.value for each in kind] for kind in (Rule, Role, Verdict)}
_WANTED = {
    "int": "a whole number of 0 or more",
    "float": "a number of 0 or more",
    "str": "a text",
    "list": "a list of texts",
}

Value = int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class Key:
    """One setting, as `config_keys.toml` describes it. None as a default means "not set"."""

    section: str
    name: str
    kind: str
    default: Value
    help: str = ""
    per_module: bool = False
    choices: str = ""
    """The enumeration whose values it takes; any value if empty."""

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"MXPROBE_{self.section}_{self.name}".upper()

    def parse(self, value: Any, where: str) -> Value:
        """Convert a value of TOML, or text of the environment or the command line. UsageError says what was wanted."""
        try:
            parsed = self._convert(value)
        except ValueError:
            raise UsageError(f"{where}: {self.path} = {value!r} is not {_WANTED[self.kind]}") from None
        choices = _CHOICES.get(self.choices, [])
        for item in parsed if isinstance(parsed, tuple) else (parsed,):
            if choices and item not in choices:
                raise UsageError(
                    f"{where}: {self.path} does not know {item!r}{_nearest(str(item), choices)}",
                    remedy=f"use one of: {', '.join(choices)}",
                )
        return parsed

    def _convert(self, value: Any) -> Value:
        """Return the value in the kind of this key. ValueError where it is of another kind."""
        if self.kind == "str" and isinstance(value, str):
            return value
        if self.kind == "list":
            items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return tuple(items)
        if self.kind in ("int", "float") and not isinstance(value, bool):
            takes = (int, str) if self.kind == "int" else (int, float, str)
            number = (int if self.kind == "int" else float)(value) if isinstance(value, takes) else math.nan
            if math.isfinite(number) and number >= 0:
                return number
        raise ValueError


_DEFAULTS = {**asdict(AgentConfig()), "max_overhead": None, "step_timeout": AgentConfig.step_timeout_s}
_KEYS = {
    section: tuple(
        Key(section, name, default=_DEFAULTS.get(name) if section == "attach" else None, **described)
        for name, described in keys.items()
    )
    for section, keys in tomllib.loads(_KEYS_FILE.read_text(encoding="utf-8")).items()
}


@cache
def keys_of(section: str) -> tuple[Key, ...]:
    """Return the keys of a section, in the order they are shown."""
    if section != "verdict":
        return _KEYS[section]
    from mxprobe.attribution.thresholds import Thresholds

    kinds = {int: "int", float: "float", str: "str"}
    return tuple(Key(section, name, kinds[type(value)], value) for name, value in asdict(Thresholds()).items())


@dataclass(frozen=True)
class Setting:
    """An effective value and its source: `default`, a file's path, an environment variable, `command line`."""

    key: Key
    value: Value
    source: str


@dataclass(frozen=True)
class LayerOverride:
    """Limits for the modules whose name matches `glob`. Where several match, a later one wins key by key."""

    glob: str
    limits: dict[str, float]
    source: str


@dataclass(frozen=True)
class Settings:
    """The settings in force, with their sources."""

    settings: tuple[Setting, ...]
    overrides: tuple[LayerOverride, ...]
    files: tuple[Path, ...]

    def section(self, name: str) -> dict[str, Value]:
        """Return key -> value of one section."""
        return {each.key.name: each.value for each in self.settings if each.key.section == name}

    def thresholds(self) -> Thresholds:
        """Return `[verdict]` as the verdict engine takes it."""
        from mxprobe.attribution.thresholds import Thresholds

        return Thresholds().replace(**self.section("verdict"))

    def command_defaults(self, section: str) -> dict[str, Any]:
        """Return the values that something set, for click to take as defaults of that command."""
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
    """Read the settings from files, the environment and the command line.

    Args:
        config: this file instead of those found from `start` (default: the working directory) upwards.
        assignments: `section.key=value` from the command line; without a section, the last that has such a key.
        sections: the sections to read; the others are not looked at.
        environ: environment variables; default `os.environ`.

    Raises:
        UsageError: unreadable file, unknown key (with the nearest known one), value of the wrong kind.
    """
    settings = {key.path: Setting(key, key.default, DEFAULT) for section in sections for key in keys_of(section)}
    overrides: list[LayerOverride] = []
    used: list[Path] = []
    for file in _found(start or Path.cwd()) if config is None else (config,):
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
                    overrides += _overrides(value, file)
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
    """Return the files of the nearest directory that has one with settings, pyproject first: the later one wins."""
    for directory in (start.absolute(), *start.absolute().parents):
        here = [path for name in (PYPROJECT_FILE, CONFIG_FILE) if (path := directory / name).is_file()]
        if any(path.name == CONFIG_FILE or _read(path) is not None for path in here):
            return tuple(here)
    return ()


def _read(file: Path) -> dict[str, Any] | None:
    """Return the settings in a file; None for a pyproject.toml without any."""
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
    for name, table in data.items():
        if name not in SECTIONS:
            raise UsageError(
                f"{file}: unknown section [{name}]{_nearest(name, SECTIONS)}",
                cause="a typing error" if isinstance(table, dict) else "a key outside of a section",
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
        keys = [_key("check", name, str(file), per_module=True) for name in limits]  # all of them numbers
        parsed: dict[str, Any] = {key.name: key.parse(limits[key.name], f"{file}, {glob}") for key in keys}
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
