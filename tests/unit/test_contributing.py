"""CONTRIBUTING leads to files that exist, and the two walks through the house stay short."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def walk(title: str) -> list[str]:
    """The files that a walk names, in order."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+\.py)`", section, re.MULTILINE)


@pytest.mark.parametrize(("title", "most"), [("Follow a tensor", 28), ("Follow a metric", 16)])
def test_a_walk_is_short_and_each_of_its_files_can_be_imported(title: str, most: int) -> None:
    files = walk(title)
    assert len(set(files)) == len(files)
    assert 10 < len(files) <= most
    for file in files:
        name = file.removeprefix("kernels/").removeprefix("reports/").removesuffix(".py").replace("/", ".")
        module = importlib.import_module(name)
        assert module.__file__ is not None
        assert Path(module.__file__).resolve() == ROOT / file


def test_every_path_in_the_page_exists() -> None:
    named = set(re.findall(r"`((?:mxprobe|kernels|reports|tests|docs|benchmarks)/[\w./]+)`", PAGE))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
