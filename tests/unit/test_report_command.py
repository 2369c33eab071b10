"""`mxprobe report` on real trace directories: files, exit codes, words."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mxprobe.cli import main
from mxprobe.errors import EXIT_TRACE, EXIT_USAGE
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, arrow
from mxprobe_reports import inputs
from tests import report_frames, trace_files
from tests.synthetic import Run, write_trace


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("traces") / "run.mxprobe", Run(outlier_gain=32.0, steps=9))


def test_page_lands_beside_the_trace_and_its_path_on_standard_output(trace: Path) -> None:
    result = report(trace)
    assert result.exit_code == 0, result.stderr
    path = trace.parent / "run.html"
    assert result.stdout.strip() == str(path)
    html = path.read_text(encoding="utf-8")
    assert "<title>run.mxprobe · mxprobe report</title>" in html
    assert not list(trace.parent.glob(".*.part"))


def test_json_says_verdict_size_and_counts(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    result = report(trace, "-o", output, "--json")
    summary = json.loads(result.stdout)
    assert summary["path"] == str(output)
    assert summary["size_bytes"] == output.stat().st_size
    assert summary["verdict"] == "enable"
    assert summary["n_probed_steps"] == 9
    assert summary["problems"] == []


def test_trace_full_of_nan_gives_a_page_that_says_so(tmp_path: Path) -> None:
    frames = report_frames.tables(n_layers=1)
    writer = TraceWriter(tmp_path / "nan.mxprobe", {})
    for table in ("tensors", "outputs", "whatif", "signals", "modules", "overhead"):
        frame = frames[table].drop(columns="rank")
        floats = [name for name, kind in TABLES[table] if kind == "float64"]
        frame[floats] = math.nan
        writer.append(table, {name: frame[name].tolist() for name in frame})
    writer.close()
    result = report(tmp_path / "nan.mxprobe")
    assert result.exit_code == 0, result.output
    assert "a sum in them is missing or not finite" in result.stderr
    assert "Every logged value is NaN" in (tmp_path / "nan.html").read_text(encoding="utf-8")


def test_not_a_trace_and_no_place_to_write_are_named(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    not_a_trace = report(tmp_path / "notes")
    assert not_a_trace.exit_code == EXIT_TRACE
    assert "is not a trace" in not_a_trace.stderr
    no_place = report(trace, "-o", tmp_path / "missing" / "page.html")
    assert no_place.exit_code == EXIT_USAGE
    assert "cannot write" in no_place.stderr


def test_report_needs_no_torch(trace: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from mxprobe.cli import main\n"
        f"main(['report', {str(trace)!r}, '-o', {str(tmp_path / 'page.html')!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'triton'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_against_lays_the_second_trace_over_the_first(trace: Path, tmp_path: Path) -> None:
    healthy = write_trace(tmp_path / "healthy.mxprobe", Run(train="mxfp4+rceil", steps=9))
    output = tmp_path / "page.html"
    result = report(trace, "--against", healthy, "-o", output, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["against"] == "healthy.mxprobe"
    html = output.read_text(encoding="utf-8")
    assert "B relative to A" in html
    assert "output error, B relative to A" in html
    assert "The mismatch of rollout and training went from" in html


def test_runs_that_cannot_be_compared_are_refused_before_a_page_is_written(trace: Path, tmp_path: Path) -> None:
    TraceWriter(tmp_path / "empty.mxprobe", {}).close()
    result = report(trace, "--against", tmp_path / "empty.mxprobe", "-o", tmp_path / "page.html")
    assert result.exit_code == EXIT_USAGE
    assert "has no measured module" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_trace_beyond_the_limits_is_read_in_windows_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "ROWS_PER_PIECE", 84)  # two steps of one layer's operands
    path, tables = tmp_path / "long.mxprobe", trace_files.frames(1, 16, 1)
    writer = TraceWriter(path, {})
    for step in range(1, 17):
        of_step = {name: rows[rows["step"] == step] for name, rows in tables.items() if name != "modules"}
        trace_files.append(writer, of_step)
    writer.close()
    whole = json.loads(report(path, "--json").stdout)
    assert whole["n_probed_steps"] == 16
    monkeypatch.setitem(inputs.MAX_ROWS, "tensors", 168)  # a quarter of the rows
    result = report(path, "--json")
    assert result.exit_code == 0, result.output
    part = json.loads(result.stdout)
    assert part["n_probed_steps"] == 4
    assert "are of 2 of its 8 windows of steps, evenly spaced. The verdict and the signals use all." in result.stderr
    assert "windows of steps, evenly spaced" in (tmp_path / "long.html").read_text(encoding="utf-8")
    assert part["verdict"] == whole["verdict"]
    assert part["n_operands"] == whole["n_operands"]
