"""Traces with hostile names through every command: none breaks, nothing is taken for markup or a terminal command.

On a pseudo-terminal: colours are on there, and what is written reaches a terminal that would act on it.
"""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from mxprobe.cli import main
from mxprobe.trace import open_trace
from tests.hostile import DIRECTORY, MODULES, RAW_KEY, hostile
from tests.unit.test_compare import recipe, run

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PLAIN_BRACKETS = "[bold]mlp[up][/]"


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("hostile") / f"{DIRECTORY}.mxprobe", hostile)


@pytest.fixture(scope="module")
def b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = {MODULES[2]: MODULES[4], MODULES[1]: MODULES[0], RAW_KEY: RAW_KEY}
    directory = tmp_path_factory.mktemp("other") / f"b{DIRECTORY}.mxprobe"
    return run(directory, hostile, recipe("mxfp4+of:0.5", 0.25), config=facts)


def on_terminal(*arguments: object) -> tuple[int, str]:
    """Exit code and all that a terminal of 200 columns gets."""
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "60", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "mxprobe", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=inner,
        stderr=inner,
        env=environment,
    )
    os.close(inner)
    data, deadline = b"", time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            if select.select([outer], [], [], 1.0)[0]:
                chunk = os.read(outer, 65536)
                data += chunk
                if not chunk:
                    break
    except OSError:  # Linux says so when the other side is closed
        pass
    finally:
        os.close(outer)
        if time.monotonic() >= deadline:
            process.kill()
    return process.wait(60), data.decode()


@pytest.mark.parametrize(
    ("command", "code", "shown"),
    [
        ("compare {a} {b} --all", 0, (PLAIN_BRACKETS, "</script>")),
        ("check {a} --set max_nmse=0.001 --set max_realised_error=0.001", 1, (PLAIN_BRACKETS, "mlp.up-proj")),
        ("recommend {a}", 0, (PLAIN_BRACKETS,)),
        ("recommend {a} --explain", 0, (PLAIN_BRACKETS, "</script>")),
        ("recommend {a} --framework trl", 0, (PLAIN_BRACKETS,)),
        ("live {a} --once", 0, (PLAIN_BRACKETS, "mlp.up-proj")),
        ("export {a} --format json -o {out}", 0, ("tensors.json",)),
        ("export {a} --to tensorboard --modules * -o {out}", 0, ("tensorboard --logdir",)),
        ("report {a} -o {out}.html", 0, (".html",)),
    ],
)
def test_nothing_reaches_the_terminal_but_text_and_colour(
    command: str, code: int, shown: tuple[str, ...], a: Path, b: Path, tmp_path: Path
) -> None:
    words = {"{a}": a, "{b}": b, "{out}": tmp_path / "out", "{out}.html": tmp_path / "out.html"}
    returned, text = on_terminal(*(words.get(word, word) for word in command.split()))
    assert returned == code, text
    assert "Traceback" not in text
    plain = COLOUR.sub("", text)
    assert "\x1b" not in plain
    assert not any(ord(c) < 32 and c not in "\r\n\t" for c in plain)
    for name in shown:
        assert name in plain


@pytest.mark.parametrize("command", ["compare {a} {b}", "check {a} --set max_nmse=0.001", "recommend {a}"])
def test_json_keeps_names_whole(command: str, a: Path, b: Path) -> None:
    words = {"{a}": str(a), "{b}": str(b)}
    result = CliRunner().invoke(main, [*(words.get(word, word) for word in command.split()), "--json"])
    assert result.exit_code in (0, 1), result.output
    texts = list(strings(json.loads(result.stdout)))
    assert any(PLAIN_BRACKETS in text for text in texts)


def strings(data: object) -> list[str]:
    if isinstance(data, dict):
        return [text for key, value in data.items() for text in (str(key), *strings(value))]
    if isinstance(data, list):
        return [text for value in data for text in strings(value)]
    return [data] if isinstance(data, str) else []


def test_files_and_curves_keep_modules_apart_that_slug_alike(a: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    result = CliRunner().invoke(
        main, ["export", str(a), "--to", "tensorboard", "--modules", "*", "-o", str(tmp_path), "--name", "x"]
    )
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "x").iterdir()
    tags = {value.tag for event in EventFileLoader(str(file)).Load() for value in event.summary.value}
    assert {f"mxprobe/train/x_fwd/{name}/nmse" for name in MODULES} <= tags
    assert f"signals/{RAW_KEY}" in tags
    assert CliRunner().invoke(main, ["export", str(a), "--format", "json", "-o", str(tmp_path / "j")]).exit_code == 0
    rows = json.loads((tmp_path / "j" / "tensors.json").read_text(encoding="utf-8"))
    assert {row["module"] for row in rows} == set(MODULES)


def test_junit_is_xml(a: Path, tmp_path: Path) -> None:
    xml = tmp_path / "junit.xml"
    result = CliRunner().invoke(main, ["check", str(a), "--set", "max_nmse=0.001", "--junit", str(xml)])
    assert result.exit_code == 1
    names = {case.get("name") for case in ElementTree.parse(xml).iter("testcase")}
    assert {MODULES[0], MODULES[1], MODULES[2], MODULES[3], "mlp.up-proj", "mlp-up.proj"} <= names


def test_notebook_html_is_escaped_and_short(a: Path, b: Path) -> None:
    from mxprobe.attribution import recommend
    from mxprobe.comparison import compare

    traces = open_trace(a), open_trace(b)
    for shown in (traces[0], recommend(traces[0]), compare(*traces)):
        html = shown._repr_html_()  # pyright: ignore[reportPrivateUsage]
        assert len(html) < 6000
        tags = set(re.findall(r"<\s*/?([^\s>]*)", html))
        assert tags <= {"p", "b", "br", "table", "tr", "th", "td", "ul", "li"}, tags
    assert "[bold]" in recommend(traces[0])._repr_html_()  # pyright: ignore[reportPrivateUsage]
