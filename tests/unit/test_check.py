"""`mxprobe check`: what holds, what is breached, what cannot be checked; exit codes, JSON and JUnit."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from mxprobe.checks import Status, check_trace, to_junit
from mxprobe.cli import main
from mxprobe.config import load
from mxprobe.trace import open_trace
from tests import report_frames
from tests.trace_files import frames, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("check") / "run.mxprobe", frames())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without settings above it."""
    monkeypatch.chdir(tmp_path)


def check(trace: Path, *options: str, toml: str | None = None) -> Result:
    if toml is not None:
        Path("mxprobe.toml").write_text(toml)
    return CliRunner().invoke(main, ["check", str(trace), *options])


def test_holds(trace: Path) -> None:
    result = check(trace, toml="[check]\nmax_nmse = 0.05\nmax_dropped = 0\nmin_coverage = 0.5\nmin_steps = 8\n")
    assert result.exit_code == 0
    assert "all limits hold" in result.stdout
    assert "FAIL" not in result.stdout
    assert "ok    max_nmse  worst of 42: 0.0" in result.stdout  # 7 modules x 6 roles


def test_names_the_offenders_and_no_other(trace: Path) -> None:
    """report_frames plants outliers behind the norms: inputs of q, k, v, gate and up have NMSE .021, others .0134."""
    result = check(trace, "--json", toml="[check]\nmax_nmse = 0.017\n")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    offenders = {(each["module"], each["role"]) for each in found["findings"] if each["status"] == "breached"}
    expected = {
        (name, role)
        for name in report_frames.module_names(1)
        if name.endswith(report_frames.FED_BY_NORM)
        for role in ("x_fwd", "x_wgrad")
    }
    assert offenders == expected
    assert (found["passed"], found["n_checked"], found["n_failed"]) == (False, 42, 10)
    text = check(trace, "--set", "roles=x_fwd")
    assert "FAIL  max_nmse  5 of 7 beyond it" in text.stdout
    assert "model.layers.0.mlp.up_proj x_fwd train has 0.02" in text.stdout


def test_a_later_glob_wins_and_others_keep_their_limit(trace: Path) -> None:
    toml = '[check]\nmax_nmse = 0.017\nroles = ["x_fwd"]\n[check.layers."*.mlp.*"]\nmax_nmse = 1.0\n'
    found = json.loads(check(trace, "--json", toml=toml).stdout)
    breached = {each["module"] for each in found["findings"] if each["status"] == "breached"}
    assert breached == {f"model.layers.0.self_attn.{kind}" for kind in ("q_proj", "k_proj", "v_proj")}
    toml += '[check.layers."*.up_proj"]\nmax_nmse = 0.001\n'
    found = json.loads(check(trace, "--json", toml=toml).stdout)
    breached = {each["module"] for each in found["findings"] if each["status"] == "breached"}
    assert "model.layers.0.mlp.up_proj" in breached


def test_a_limit_that_cannot_be_checked_fails(tmp_path: Path) -> None:
    bare = write_trace(tmp_path / "bare.mxprobe", {"signals": report_frames.signals(20)})
    toml = "[check]\nmax_nmse = 1\nmax_mismatch = 1\nmax_overhead = 1\nmax_realised_error = 1\nmin_coverage = 0\n"
    result = check(bare, "--json", toml=toml)
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert {each["limit"] for each in findings} == {line.split(" =")[0] for line in toml.splitlines()[1:]}
    assert {each["status"] for each in findings} == {"not measured"}


def test_a_glob_that_matches_nothing_fails(trace: Path) -> None:
    result = check(trace, toml='[check]\nmax_nmse = 1\n[check.layers."*.mpl.*"]\nmax_nmse = 2\n')
    assert result.exit_code == 1
    assert "no measured module matches *.mpl.*" in result.stdout


def test_run_limits(trace: Path) -> None:
    limits = ("max_mismatch = 0.002", "max_overhead = 1e-4", "min_coverage = 0.9999", "min_steps = 1000")
    toml = "\n".join(("[check]", *limits, "max_nonfinite = 0"))
    result = check(trace, "--json", toml=toml)
    status = {each["limit"]: each["status"] for each in json.loads(result.stdout)["findings"]}
    assert status == {
        "max_mismatch": "breached",
        "max_overhead": "breached",
        "min_coverage": "breached",
        "min_steps": "breached",
        "max_nonfinite": "ok",
    }


def test_verdicts(trace: Path) -> None:
    allowed = check(trace, "--json", "--set", "allow_verdicts=none_needed,nothing_quantized")
    (finding,) = json.loads(allowed.stdout)["findings"]
    assert finding["status"] == "breached"
    assert allowed.exit_code == 1
    assert check(trace, "--set", f"allow_verdicts={finding['value']}").exit_code == 0


def test_verdict_thresholds_come_from_the_same_file(trace: Path) -> None:
    toml = '[check]\nallow_verdicts = ["not_enough_evidence"]\n[verdict]\nmin_steps = 5000\n'
    assert check(trace, toml=toml).exit_code == 0


def test_exit_codes_of_wrong_use(trace: Path, tmp_path: Path) -> None:
    nothing = check(trace)
    assert nothing.exit_code == 2
    assert "no limit is set" in nothing.stderr
    assert check(trace, "--set", "max_nsme=1").exit_code == 2
    assert check(tmp_path / "missing", "--set", "max_nmse=1").exit_code == 3
    assert check(tmp_path, "--set", "max_nmse=1").exit_code == 3
    empty = write_trace(tmp_path / "empty.mxprobe", {})
    assert check(empty, "--set", "max_nmse=1").exit_code == 3
    assert check(trace, "--set", "max_nmse=1", "--junit", str(tmp_path / "no" / "where.xml")).exit_code == 2


def test_a_cut_trace_is_checked_and_said_to_be_cut(tmp_path: Path) -> None:
    cut = write_trace(tmp_path / "cut.mxprobe", frames(), close=False)
    path = cut / "live" / "rank=0" / "tensors-00000.arrows"
    path.write_bytes(path.read_bytes()[:-100])
    result = check(cut, "--set", "max_dropped=0")
    assert result.exit_code == 0
    assert "writer died" in result.stderr
    assert "is cut" in result.stderr


def test_junit_counts_and_survives_hostile_names(tmp_path: Path) -> None:
    names = ["model.layers.0.q_proj", "a<b>&\"'\x00\x1b[31m]]>", "snow ☃ \ud800".encode("utf-8", "replace").decode()]
    tables = frames()
    tables["tensors"] = report_frames.tensors(names, [1, 2, 3], outliers=False)
    hostile = write_trace(tmp_path / "hostile.mxprobe", tables)
    xml = tmp_path / "junit.xml"
    result = check(hostile, "--set", "max_nmse=0.001", "--set", "max_dropped=0", "--junit", str(xml))
    assert result.exit_code == 1
    suite = ElementTree.parse(xml).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "3", "0")
    failed = {case.get("name") for case in suite if len(case)}
    assert "model.layers.0.q_proj" in failed
    assert len(failed) == 3
    assert {case.get("classname") for case in suite} == {"mxprobe.max_nmse", "mxprobe.max_dropped"}


def test_junit_tells_a_failure_from_what_was_not_measured(tmp_path: Path) -> None:
    bare = open_trace(write_trace(tmp_path / "bare.mxprobe", {"signals": report_frames.signals(20)}))
    result = check_trace(bare, load(assignments=["max_nmse=1"], sections=("verdict", "check"), environ={}))
    assert [finding.status for finding in result.findings] == [Status.NOT_MEASURED]
    suite = ElementTree.fromstring(to_junit(result, "bare").encode())[0]
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")


def test_reading_commands_need_no_torch(trace: Path) -> None:
    """Traces are read on laptops."""
    code = f"""
import sys
from click.testing import CliRunner
from mxprobe.cli import main
for arguments in (["check", {str(trace)!r}, "--set", "max_nmse=1"], ["compare", {str(trace)!r}, {str(trace)!r}],
                  ["export", {str(trace)!r}, "--format", "csv"], ["live", {str(trace)!r}, "--once"],
                  ["config", "show"]):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
