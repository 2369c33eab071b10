"""Canonical metric names, and which key of which framework means which of them.

Frameworks log the same quantity under different names, and different quantities under the same name; so each
alias names its estimator too. Keys that no alias covers stay in the trace with an empty `metric`. The tables are in
`metrics.toml`.

A value that was NaN is a row with NaN; a value that was missing is no row. Reading that difference is up to whoever
reads: `isna` on rows, absence on steps.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

OWN = "mxprobe"
"""`framework` of the rows that the agent measured itself."""


@dataclass(frozen=True)
class Metric:
    """A canonical training metric."""

    unit: str
    description: str


@dataclass(frozen=True)
class Alias:
    """A framework's key for a canonical metric and the estimator behind it."""

    metric: str
    estimator: str = ""


_TABLES: dict[str, Any] = tomllib.loads((files("mxprobe") / "metrics.toml").read_text(encoding="utf-8"))


def _aliases(table: Mapping[str, str]) -> dict[str, Alias]:
    return {key: Alias(*meaning.split(": ")) for key, meaning in table.items()}


def _with_base(framework: str) -> tuple[str, ...]:
    """Return the framework whose keys it takes over, if any, and itself."""
    base = _TABLES["extends"].get(framework)
    return (framework,) if base is None else (base, framework)


def _patterns(framework: str) -> list[tuple[re.Pattern[str], Alias]]:
    tables: list[dict[str, Any]] = [_TABLES["patterns"].get(name, {}) for name in _with_base(framework)]
    return [
        (re.compile(table.get("prefix", "") + key), alias)
        for table in tables
        for key, alias in _aliases(table.get("keys", {})).items()
    ]


METRICS: dict[str, Metric] = {name: Metric(*about) for name, about in _TABLES["metrics"].items()}

LOGGERS: tuple[str, ...] = tuple(_TABLES["loggers"])
"""Scripts of their own log to these, which are preferred in this order."""

ALIASES: dict[str, dict[str, Alias]] = {
    framework: {
        key: alias for name in _with_base(framework) for key, alias in _aliases(_TABLES["aliases"][name]).items()
    }
    for framework in _TABLES["aliases"]
} | {
    name: _aliases(_TABLES["logged"] | {f"train/{key}": to for key, to in _TABLES["logged"].items()})
    for name in LOGGERS
}
"""Framework or logger -> key -> what it means."""

PATTERNS: dict[str, list[tuple[re.Pattern[str], Alias]]] = {name: _patterns(name) for name in _TABLES["aliases"]}
"""Framework -> patterns of whole keys and what they mean, asked after `ALIASES`."""

# `eval_loss`, `eval/...`, `eval-rollout/...`, `val-core/...`, `validation/...`: only where the key begins so, since a
# reward function may be called anything.
_EVALUATION = re.compile(r"(?:eval|evaluation|val|valid|validation|test)(?:[-_/].*)?", re.DOTALL)


def is_evaluation(raw_key: str) -> bool:
    """Return whether a key is one of evaluation, which never means a training metric."""
    return _EVALUATION.fullmatch(raw_key) is not None


def resolve(framework: str, raw_key: str) -> Alias | None:
    """Return the canonical meaning of a key, or None; always None for keys of evaluation."""
    if is_evaluation(raw_key):
        return None
    alias = ALIASES.get(framework, {}).get(raw_key)
    if alias is not None:
        return alias
    for pattern, candidate in PATTERNS.get(framework, ()):
        if pattern.fullmatch(raw_key):
            return candidate
    return None


def canonicalize(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Fill `metric` and `estimator` of `signals` columns from `framework` and `raw_key`.

    Rows that carry a metric already keep it. Unmapped keys get an empty metric. KeyError when `raw_key` is absent.
    """
    keys = columns["raw_key"]
    frameworks = columns.get("framework", [""] * len(keys))
    given_metrics = columns.get("metric", [""] * len(keys))
    given_estimators = columns.get("estimator", [""] * len(keys))
    metrics: list[str] = []
    estimators: list[str] = []
    for framework, key, metric, estimator in zip(frameworks, keys, given_metrics, given_estimators, strict=True):
        alias = None if metric else resolve(framework or "", key)
        metrics.append(alias.metric if alias else metric or "")
        estimators.append(alias.estimator if alias else estimator or "")
    return {**columns, "metric": metrics, "estimator": estimators}


@dataclass(frozen=True)
class Series:
    """One line of a trace: the values that one sink logged under one key."""

    source: str
    framework: str
    raw_key: str


def preferred(series: Iterable[Series]) -> Series | None:
    """Return the one to show of several series that mean the same metric; None if there are none.

    Two keys of a framework may mean one metric by two estimators, and a script may write one number to two loggers:
    they are alternatives, not samples to be averaged. Frameworks come before loggers and those before measurements of
    our own, which sample; then the order of the aliases.
    """

    def rank(one: Series) -> tuple[int, int, str, str]:
        keys = list(ALIASES.get(one.framework, {}))
        position = keys.index(one.raw_key) if one.raw_key in keys else len(keys)
        kind = 2 if one.framework == OWN else int(one.framework in LOGGERS)
        return kind, position, one.source, one.raw_key

    return min(series, key=rank, default=None)
