"""Pages under docs/commands are what the code prints, and the script that writes them leaves other text alone."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mxprobe.cli import COMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_build"] = module
    spec.loader.exec_module(module)
    return module


def test_command_pages_are_up_to_date(build: ModuleType) -> None:
    stale = [path.name for path in build.stale_pages()]
    assert stale == [], "run `python docs/build.py` and commit what it writes"


def test_each_command_has_a_page_with_its_help() -> None:
    for name in COMMANDS:
        assert f"Usage: mxprobe {name} " in (DOCS / "commands" / f"{name}.md").read_text(encoding="utf-8")


def test_text_around_the_help_is_kept_and_an_old_help_replaced(build: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    page.write_text(f"# Mine\n\nbefore\n\n{build.BEGIN}\nold\n{build.END}\n\nafter\n", encoding="utf-8")
    text = build.stale_pages(tmp_path)[page]
    assert text.startswith("# Mine\n\nbefore\n")
    assert text.endswith("\n\nafter\n")
    assert "old" not in text
    assert "--against B" in text
    page.write_text(text, encoding="utf-8")
    assert page not in build.stale_pages(tmp_path)


def test_the_picture_of_the_readme_is_there_and_small() -> None:
    picture = (DOCS / "report.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) < 400_000
    assert (int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")) == (1440, 1000)
