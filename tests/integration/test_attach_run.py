"""`mxprobe run`: the job is what it would be without it, and can be entered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.attach import startup_hook
from mxprobe.attach.process import look_up
from mxprobe.attach.rundir import listener_socket_of
from tests.attach_targets import MXPROBE, interpreters, mxprobe, running

RUN = [*MXPROBE, "run", "--"]


def test_exit_code_and_output_are_the_jobs() -> None:
    done = subprocess.run(
        [*RUN, sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "--flag", "-o", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "['--flag', '-o', 'x']\n", "")


def test_signals_reach_the_job_which_is_this_process() -> None:
    with running("import time\nprint('up', flush=True)\ntime.sleep(60)", prefix=RUN) as process:
        assert look_up(process.pid).command_line[1] == "-c"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_an_environments_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")
    code = "import os, sys, sitecustomize; print(sys.theirs, sitecustomize.__file__, sys.path[1])"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*RUN, sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    theirs = str(tmp_path / "sitecustomize.py")
    assert done.stdout == f"{theirs} {theirs} {tmp_path}\n"
    assert done.stderr == ""


def test_the_search_path_is_as_without_it() -> None:
    code = "import sys; print(sys.path)"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    under = subprocess.run([*RUN, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert under.stdout == plain.stdout


@pytest.mark.parametrize("python", interpreters())
def test_the_job_and_its_children_listen_in_every_python(python: str, tmp_path: Path) -> None:
    """mxprobe need not be installed for the job's interpreter."""
    child = "import time; print('up', flush=True); time.sleep(60)"
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "assert child.stdout.readline() == 'up\\n'\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('up', flush=True)\nsys.stdin.read()\nchild.kill()\n"
    )
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with running(program, python=python, prefix=RUN, env=environ, stdin=subprocess.PIPE) as process:
        for pid in (process.pid, int((tmp_path / "child").read_text())):
            path = listener_socket_of(look_up(pid))
            assert path == tmp_path / f"mxprobe-{os.getuid()}" / f"{pid}.listen.sock"
        process.communicate(timeout=10)


def test_the_start_up_hook_listens_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put into a directory of its own, which `site` is told to treat as a site directory."""
    monkeypatch.setattr(startup_hook, "hook_path", lambda: tmp_path / "mxprobe-listener.pth")
    assert startup_hook.remove() is None
    hook = startup_hook.install()
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('mxprobe.listener' in sys.modules)"
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    for value, listening in (("1", "True\n"), ("0", "False\n")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**environ, "MXPROBE_LISTEN": value},
            check=True,
        )
        assert (done.stdout, done.stderr) == (listening, "")
    assert startup_hook.remove() == hook
    assert not hook.exists()


def test_doctor_finds_both_ways_in() -> None:
    done = mxprobe("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert '"ways_in": [\n    "listener",\n    "ptrace"\n  ]' in done.stdout
    in_words = mxprobe("doctor").stdout
    assert "ok  ptrace" in in_words
    assert "main thread stopped" in in_words
