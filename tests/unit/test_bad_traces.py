"""Every reading command on every kind of bad trace: it says so, or ends in an error in words; never in a traceback."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mxprobe.cli import main
from mxprobe.errors import EXIT_BREACHED, EXIT_OK, EXIT_TRACE, EXIT_USAGE
from mxprobe.schema import SCHEMA_VERSION
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, layout
from tests.trace_files import frames, write_trace

SMALL = frames(1, 40, 10)
REFUSED = dict.fromkeys(("report", "recommend", "compare", "check", "export", "live"), EXIT_TRACE)


def empty(directory: Path) -> None:
    TraceWriter(directory, {}).close()


def one_step(directory: Path) -> None:
    write_trace(directory, frames(1, 10, 10))


def no_signals(directory: Path) -> None:
    write_trace(directory, {name: rows for name, rows in SMALL.items() if name != "signals"})


def missing_rank(directory: Path) -> None:
    """Rank 1 of three left no file."""
    write_trace(directory, SMALL)
    for table in ("tensors", "overhead"):
        part = layout.part_files(directory, table)[0].path
        copy = layout.part_path(directory, table, 2, 0)
        copy.parent.mkdir(parents=True)
        shutil.copy(part, copy)


def nan_laden(directory: Path) -> None:
    rows = {name: frame.copy() for name, frame in SMALL.items()}
    for name, frame in rows.items():
        floats = [column for column, kind in TABLES[name] if kind == "float64"]
        frame[floats] = math.nan
    write_trace(directory, rows)


def newer_schema(directory: Path) -> None:
    write_trace(directory, frames(1, 10, 10))
    run = json.loads((directory / layout.RUN_FILE).read_text())
    (directory / layout.RUN_FILE).write_text(json.dumps({**run, "schema_version": SCHEMA_VERSION + 1}))


def cut_live_file(directory: Path) -> None:
    write_trace(directory, SMALL, close=False)
    live = layout.live_path(directory, "tensors", 0)
    whole = live.read_bytes()
    live.write_bytes(whole + whole[: len(whole) // 2])


def cut_part(directory: Path) -> None:
    write_trace(directory, SMALL)
    for table in ("tensors", "outputs"):
        part = layout.part_files(directory, table)[0].path
        part.write_bytes(part.read_bytes()[:200])


def half_a_run_file(directory: Path) -> None:
    write_trace(directory, SMALL)
    (directory / layout.RUN_FILE).write_text('{"schema_ver')


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], None]
    says: str
    """What `report`, `recommend` or the error says about it."""
    codes: dict[str, int] = field(default_factory=dict)
    """Commands that do not end in 0."""


NOT_COMPARED = {"compare": EXIT_USAGE}
EMPTY = dict.fromkeys(("report", "recommend", "check"), EXIT_TRACE)
LIMIT = {"check": EXIT_BREACHED}  # a limit that cannot be checked is breached
CASES = (
    Case(empty, "nothing was measured", {**EMPTY, **NOT_COMPARED}),
    Case(one_step, "Only one step was probed"),
    Case(no_signals, "No training metric was captured"),
    Case(missing_rank, "No operand was measured on rank 1"),
    Case(nan_laden, "a sum in them is missing or not finite", LIMIT),
    Case(newer_schema, "upgrade mxprobe", REFUSED),
    Case(cut_live_file, "is cut after"),
    Case(cut_part, "damaged or was copied in part", REFUSED),
    Case(half_a_run_file, "half written"),
)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), arguments
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_a_bad_trace_is_named_by_every_command(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace, good = tmp_path / "bad.mxprobe", tmp_path / "good.mxprobe"
    case.make(trace)
    write_trace(good, SMALL)
    results = {
        "report": run("report", trace, "-o", tmp_path / "page.html"),
        "recommend": run("recommend", trace),
        "compare": run("compare", good, trace),
        "check": run("check", trace, "--set", "max_output_error=2"),
        "export": run("export", trace, "--format", "csv"),
        "live": run("live", trace),
    }
    codes = {name: result.exit_code for name, result in results.items()}
    assert codes == {name: case.codes.get(name, EXIT_OK) for name in results}, {n: r.output for n, r in results.items()}
    assert case.says in results["report"].stderr
    page = tmp_path / "page.html"
    assert page.exists() == (case.codes is not REFUSED)
    if page.exists() and case.make is not empty:  # an empty page has its own test
        assert case.says in page.read_text(encoding="utf-8")
    for name, result in results.items():
        if result.exit_code:
            assert result.output.strip(), name
        if result.exit_code in (EXIT_TRACE, EXIT_USAGE):
            assert "what to do:" in result.stderr, name


def test_an_empty_trace_gives_a_page_and_a_verdict_all_the_same(tmp_path: Path) -> None:
    empty(tmp_path / "empty.mxprobe")
    result = run("report", tmp_path / "empty.mxprobe")
    assert result.exit_code == EXIT_TRACE
    assert "The trace is empty" in (tmp_path / "empty.html").read_text(encoding="utf-8")
    answer = run("recommend", tmp_path / "empty.mxprobe", "--json")
    assert answer.exit_code == EXIT_TRACE
    assert json.loads(answer.stdout)["verdict"] == "not_enough_evidence"


def test_numbers_that_are_all_nan_are_no_good_news(tmp_path: Path) -> None:
    nan_laden(tmp_path / "nan.mxprobe")
    write_trace(tmp_path / "good.mxprobe", SMALL)
    assert (
        "Not enough evidence: the trace holds no realised output errors."
        in run("recommend", tmp_path / "nan.mxprobe").stdout
    )
    compared = run("compare", tmp_path / "good.mxprobe", tmp_path / "nan.mxprobe")
    assert "No error of B is a finite number" in compared.stderr
    assert run("compare", tmp_path / "nan.mxprobe", tmp_path / "good.mxprobe").exit_code == EXIT_OK
