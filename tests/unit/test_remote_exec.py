"""When `sys.remote_exec` is taken and how it refuses; there is no Python 3.14 here to run it against."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mxprobe.attach import entry, gdb, remote_exec
from mxprobe.attach.process import look_up
from mxprobe.errors import AttachError
from tests.attach_targets import interpreters, running

ME = look_up(os.getpid())


@pytest.mark.parametrize("python", interpreters())
def test_the_version_is_read_from_the_process(python: str) -> None:
    program = "import sys, time\nprint('up', flush=True)\ntime.sleep(60)"
    code = "import sys; print(sys.hexversion)"
    version = int(subprocess.check_output([python, "-c", code]))
    with running(program, python=python) as process:
        assert remote_exec.version_of(process.pid) == (version if version >= 0x030B0000 else None)
        assert remote_exec.is_offered(process.pid) is (version >= 0x030E0000)


def test_a_process_that_is_not_python_or_gone_offers_nothing() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert not remote_exec.is_offered(child.pid)
    child.kill()
    child.wait()
    assert not remote_exec.is_offered(child.pid)


def test_the_interpreter_is_the_very_file_that_runs() -> None:
    path = remote_exec.interpreter_of(ME)
    assert path is not None
    assert os.path.samefile(path, sys.executable)
    assert remote_exec.interpreter_of(replace(ME, pid=4194304)) is None


@pytest.mark.parametrize(
    ("last_line", "reason"),
    [
        ("RuntimeError: Remote debugging is not enabled in the remote process", "remote_debugging_disabled"),
        ("PermissionError: [Errno 1] Cannot read process memory", "not_permitted"),
        ("ProcessLookupError: [Errno 3] No such process", "exited"),
        ("RuntimeError: The remote interpreter is of another version", "no_remote_exec"),
        ("", "no_remote_exec"),
    ],
)
def test_what_the_interpreter_says_becomes_a_refusal(last_line: str, reason: str) -> None:
    traceback = f"Traceback (most recent call last):\n  File ...\n{last_line}\n" if last_line else ""
    error = remote_exec.refusal_in(7, traceback)
    assert error.reason == reason
    if last_line and reason != "remote_debugging_disabled":
        assert last_line.split(":")[0] in str(error)


def test_an_interpreter_without_it_is_refused(tmp_path: Path) -> None:
    """This one, older than 3.14, asked for real."""
    if sys.version_info >= (3, 14):
        pytest.skip("this interpreter has it")
    with pytest.raises(AttachError, match="remote_exec") as error:
        remote_exec.run_script(ME, tmp_path / "script.py")
    assert error.value.reason == "no_remote_exec"


@pytest.mark.parametrize(
    ("offered", "interpreter", "machine", "has_gdb", "way"),
    [
        (True, "/usr/bin/python3.14", "x86_64", True, "remote_exec"),
        (True, None, "x86_64", True, "ptrace"),
        (False, "/usr/bin/python3.11", "x86_64", True, "ptrace"),
        (False, "/usr/bin/python3.11", "aarch64", True, "gdb"),
        (False, "/usr/bin/python3.11", "aarch64", False, "ptrace"),
        (True, "/usr/bin/python3.14", "aarch64", False, "remote_exec"),
    ],
)
def test_the_first_way_that_is_open(
    offered: bool, interpreter: str | None, machine: str, has_gdb: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_exec, "is_offered", lambda pid: offered)
    monkeypatch.setattr(remote_exec, "interpreter_of", lambda process: interpreter)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(gdb, "is_here", lambda: has_gdb)
    assert entry.way_from_outside(ME) == way


def test_without_a_way_the_refusal_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(gdb, "is_here", lambda: False)
    with pytest.raises(AttachError, match="install gdb") as error:
        entry.check_reachable(ME)
    assert error.value.reason == "unsupported_architecture"
