"""Reads the known pitfalls, their titles and symptoms, from `pitfalls.toml`; `searches` finds them in a trace."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Pitfall:
    """A known mistake: how it is called and what it does to a run."""

    slug: str
    title: str
    symptom: str


@dataclass(frozen=True)
class Finding:
    pitfall: Pitfall
    modules: tuple[str, ...]
    """Empty where it is about the run as a whole."""
    detail: str


def _read() -> dict[str, Pitfall]:
    text = (files("mxprobe.audit") / "pitfalls.toml").read_text(encoding="utf-8")
    return {slug: Pitfall(slug, **words) for slug, words in tomllib.loads(text).items()}


PITFALLS: dict[str, Pitfall] = _read()
"""In the order in which findings are shown."""
