"""What stands in the way of an attach, and the remedy that is named for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mxprobe.attach.host_checks import (
    check_permissions,
    dumpable,
    has_ptrace_capability,
    interpreter,
    pid_namespace,
    remote_debugging,
    yama,
)


@pytest.mark.parametrize(
    ("scope", "capable", "ok", "remedy"),
    [
        (None, False, True, ""),
        ("0", False, True, ""),
        ("1", True, True, ""),
        ("1", False, False, "sysctl kernel.yama.ptrace_scope=0"),
        ("2", False, False, "kubectl debug"),
        ("3", True, False, "reboot"),
    ],
)
def test_yama(scope: str | None, capable: bool, ok: bool, remedy: str) -> None:
    finding = yama(scope, capable=capable)
    assert finding.ok is ok
    assert remedy in finding.remedy
    assert bool(finding.remedy) is not ok
    assert "mxprobe run" in finding.remedy or ok


@pytest.mark.parametrize(
    ("status", "capable"),
    [("CapEff:\t0000000000080000\n", True), ("CapEff:\t00000000a80425fb\n", False), ("Name:\tx\n", False)],
)
def test_capability(status: str, capable: bool) -> None:
    assert has_ptrace_capability(status) is capable


def test_nesting_of_pid_namespaces() -> None:
    assert "nested 1 deep" in pid_namespace(f"NSpid:\t18547\t{os.getpid()}\n").detail


@pytest.mark.parametrize(("value", "ok"), [(1, True), (0, False), (2, False)])
def test_dumpable(value: int, ok: bool) -> None:
    assert dumpable(value).ok is ok
    assert ("sudo" in dumpable(value).remedy) is not ok


@pytest.mark.parametrize(("value", "ok"), [("1", False), ("", True)])
def test_remote_debugging(value: str, ok: bool) -> None:
    finding = remote_debugging({"PYTHON_DISABLE_REMOTE_DEBUG": value})
    assert finding.ok is ok
    assert ("unset" in finding.remedy) is not ok


def test_this_interpreter_is_told_from_its_own_maps() -> None:
    finding = interpreter()
    assert finding.ok
    linked = subprocess.run(["ldd", os.path.realpath(sys.executable)], capture_output=True, text=True, check=True)
    assert ("a shared library" in finding.detail) is ("libpython" in linked.stdout)


def test_a_process_that_hides_is_found_out() -> None:
    """A real non-dumpable process asks about itself."""
    code = (
        "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
        "from mxprobe.attach.host_checks import check_permissions\n"
        "print([f.ok for f in check_permissions() if f.name == 'dumpable'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[False]\n", done.stderr


def test_every_obstacle_has_a_remedy() -> None:
    findings = check_permissions()
    assert len({finding.name for finding in findings}) == len(findings)
    assert all(finding.remedy for finding in findings if finding.ok is False)
