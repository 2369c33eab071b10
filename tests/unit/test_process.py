"""Facts about processes, checked on real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from mxprobe.attach.process import Process, check_attachable, look_up, main_thread_activity
from mxprobe.attach.refusals import REFUSALS, refuse
from mxprobe.errors import EXIT_ATTACH, AttachError
from tests.attach_targets import until

ME = look_up(os.getpid())


def reason_of(error: pytest.ExceptionInfo[AttachError]) -> str:
    assert error.value.exit_code == EXIT_ATTACH
    return error.value.reason


def test_facts_of_this_process() -> None:
    assert ME.pid == ME.inner_pid == os.getpid()
    assert ME.uid == os.geteuid()
    assert ME.state == "R"
    assert ME.tracer_pid == 0
    assert ME.command_line[0].endswith(os.path.basename(sys.executable))
    assert ME.is_same_and_alive()
    assert not replace(ME, start_ticks=ME.start_ticks - 1).is_same_and_alive()
    check_attachable(ME)


@pytest.mark.parametrize(
    ("command_line", "name"),
    [
        (("python", "-u", "train_grpo.py", "--lr", "1e-6"), "train_grpo"),
        (("python", "-m", "verl.trainer.main_ppo", "data.train=x.parquet"), "main_ppo"),
        (("/usr/bin/torchrun",), "torchrun"),
        (("ray::WorkerDict.update_actor",), "ray::WorkerDict.update_actor"),
        ((), "process"),
    ],
)
def test_short_name(command_line: tuple[str, ...], name: str) -> None:
    assert replace(ME, command_line=command_line).name == name


def test_no_such_process() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(AttachError) as error:
        look_up(child.pid)
    assert reason_of(error) == "no_such_process"


def test_zombie() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(AttachError, match="zombie") as error:
        look_up(child.pid)
    assert reason_of(error) == "exited"
    child.wait()


def test_thread_names_its_process() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        with pytest.raises(AttachError, match=f"mxprobe attach {os.getpid()}") as error:
            look_up(thread.native_id or 0)
        assert reason_of(error) == "not_a_process"
    finally:
        release.set()
        thread.join()


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    code = "import ctypes, sys\nctypes.CDLL(None).prctl(15, b'a) R (b 1 2')\nprint('up', flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert look_up(child.pid).start_ticks >= ME.start_ticks
        until(lambda: look_up(child.pid).state == "S")
    finally:
        child.communicate()


def with_state(state: str) -> Process:
    return replace(ME, state=state)


def test_suspended() -> None:
    with pytest.raises(AttachError, match="kill -CONT") as error:
        check_attachable(with_state("T"))
    assert reason_of(error) == "stopped"


def test_other_user_is_told_the_command_to_use() -> None:
    with pytest.raises(AttachError, match=f"sudo -u .* mxprobe attach {ME.pid}") as error:
        check_attachable(replace(ME, uid=ME.uid + 1))
    assert reason_of(error) == "other_user"


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (("-X", "disable-remote-debug", "train.py"), True),
        (("-Xdisable-remote-debug", "-m", "train"), True),
        (("-W", "error", "-X", "disable-remote-debug", "train.py"), True),
        (("train.py", "-X", "disable-remote-debug"), False),
        (("-c", "pass", "-Xdisable-remote-debug"), False),
        (("-X", "utf8", "train.py"), False),
    ],
)
def test_the_option_against_remote_debugging_is_honoured(words: tuple[str, ...], forbidden: bool) -> None:
    process = replace(ME, command_line=("python", *words), environ={})
    if not forbidden:
        check_attachable(process)
        return
    with pytest.raises(AttachError) as error:
        check_attachable(process)
    assert reason_of(error) == "remote_debugging_disabled"


@pytest.mark.parametrize(("value", "forbidden"), [("1", True), ("", False)])
def test_the_variable_against_remote_debugging_is_honoured(value: str, forbidden: bool) -> None:
    process = replace(ME, command_line=("python", "a.py"), environ={"PYTHON_DISABLE_REMOTE_DEBUG": value})
    if not forbidden:
        check_attachable(process)
        return
    with pytest.raises(AttachError, match="PYTHON_DISABLE_REMOTE_DEBUG"):
        check_attachable(process)


def test_what_the_main_thread_waits_in() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        deadline = time.monotonic() + 10
        while "nanosleep" not in (activity := main_thread_activity(child.pid)):
            assert time.monotonic() < deadline, activity
            time.sleep(0.02)
        assert activity.startswith("sleeping in ")
    finally:
        child.kill()
        child.wait()
    assert main_thread_activity(child.pid) == "not visible"


@pytest.mark.parametrize("reason", [*REFUSALS, "something_new"])
def test_every_refusal_has_all_three_parts_in_words(reason: str) -> None:
    error = refuse(reason, 4711, "a detail", seconds=2.5)
    assert error.reason == reason
    lines = str(error).splitlines()
    assert "4711" in lines[0] or reason in ("unsupported_architecture", "not_a_process")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["likely cause", "what to do"]
    assert "{" not in str(error)


def test_an_agents_own_reason_keeps_its_name() -> None:
    assert "something_new (why)" in str(refuse("something_new", 1, "why"))
