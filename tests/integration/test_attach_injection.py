"""The injector against live interpreters: every way it was once seen to hurt one must stay harmless."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import pytest

from mxprobe.attach import gdb
from mxprobe.attach.injector_process import check_ptrace, run_injector, unmap_statements
from mxprobe.attach.payload import in_thread
from mxprobe.attach.process import look_up
from mxprobe.errors import AttachError
from tests.attach_targets import NOISY, interpreters, mxprobe, running, statements_in_memory, until

AS_ROOT = os.geteuid() == 0
HOLD_STOPPED = """
import sys, time
from mxprobe.attach.ptrace import Tracee
tracee = Tracee(int(sys.argv[1]))
if sys.argv[2] == "stop":
    tracee.interrupt()
    assert tracee.wait(5) is not None
print("up", flush=True)
time.sleep(60)
"""


def marking(path: Path) -> str:
    """A statement that appends one byte to a file, in a thread of its own."""
    return in_thread(f"open({str(path)!r}, 'a').write('x')")


def progresses(process: subprocess.Popen[str]) -> bool:
    """True if the process still uses the processor: it has neither died nor deadlocked."""

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    until(lambda: process.poll() is not None or ticks() > before + 2)
    return process.poll() is None


def inject_often(python: str, count: int, tmp_path: Path) -> list[float]:
    mark = tmp_path / "mark"
    mark.touch()
    with running(NOISY, python=python) as process:
        facts = look_up(process.pid)
        pauses_ms = [run_injector(facts, marking(mark))["pause_ms"] for _ in range(count)]
        until(lambda: mark.stat().st_size == count)
        assert progresses(process)
        assert mark.stat().st_size == count
    return pauses_ms


def test_thirty_injections_run_once_each(tmp_path: Path) -> None:
    pauses_ms = sorted(inject_often(sys.executable, 30, tmp_path))
    assert pauses_ms[15] < 100


@pytest.mark.parametrize("python", interpreters()[1:])
def test_every_python(python: str, tmp_path: Path) -> None:
    inject_often(python, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("python", interpreters())
def test_very_many_injections(python: str, tmp_path: Path) -> None:
    """`MXPROBE_INJECTIONS=500` for more."""
    inject_often(python, int(os.environ.get("MXPROBE_INJECTIONS", "150")), tmp_path)


@pytest.mark.skipif(not gdb.is_here(), reason="needs gdb")
def test_gdb_queues_and_unmaps_like_the_injector(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    with running(NOISY) as process:
        facts = look_up(process.pid)
        for count in (1, 2, 3):
            answer = gdb.queue(facts, marking(mark), tmp_path)
            until(lambda count=count: mark.stat().st_size == count)
            assert statements_in_memory(process.pid) == 1
            page = (answer["page"], answer["size_bytes"])
            assert gdb.unmap(facts, [page, (page[0] ^ 1 << 40, 4096)], tmp_path)["unmapped"] == [page[0]]
            assert statements_in_memory(process.pid) == 0
        assert progresses(process)


@pytest.mark.skipif(not gdb.is_here(), reason="needs gdb")
def test_gdb_says_why_not(tmp_path: Path) -> None:
    with noisy() as process, running(HOLD_STOPPED, str(process.pid), "seize"):
        with pytest.raises(AttachError) as error:
            gdb.queue(look_up(process.pid), in_thread("pass"), tmp_path)
        assert error.value.reason == "not_permitted"


QUIET = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.002)\n"


def test_the_page_of_a_statement_that_ran_is_unmapped_and_nothing_else(tmp_path: Path) -> None:
    """The process does nothing but sleep, so that its address space is ours alone to change."""
    mark = tmp_path / "mark"
    mark.touch()

    def mappings() -> str:
        return Path(f"/proc/{process.pid}/maps").read_text()

    with running(QUIET) as process:
        facts = look_up(process.pid)
        before = ""
        for count in (1, 2, 3):  # the first thread of a process brings its own mappings
            before = mappings()
            answer = run_injector(facts, marking(mark))
            until(lambda count=count: mark.stat().st_size == count)
            page = (answer["page"], answer["size_bytes"])
            assert mappings() != before
            freed = unmap_statements(facts, [page, (page[0] ^ 1 << 40, 4096)])
            assert freed["unmapped"] == [page[0]]
            assert 0 < freed["pause_ms"] < 1000
        assert mappings() == before
        assert unmap_statements(facts, [page]) == {"pause_ms": 0.0, "unmapped": []}
        assert progresses(process)


def test_statements_that_raise_leave_the_job_alone(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with running(NOISY) as process:
        facts = look_up(process.pid)
        for source in ("raise RuntimeError", "raise SystemExit", "not Python", "import nothing_of_that_name"):
            run_injector(facts, in_thread(source))
        run_injector(facts, marking(mark))
        until(mark.exists)
        assert progresses(process)


def test_ctrl_c_meanwhile_reaches_the_users_code(tmp_path: Path) -> None:
    """Sent while the payload runs: it is in a thread, and handlers run in the main thread."""
    program = (
        "import time\nprint('up', flush=True)\ndeadline = time.time() + 20\ntry:\n"
        "    while time.time() < deadline:\n        sum(range(1000))\n    print('lost')\n"
        "except KeyboardInterrupt:\n    print('delivered')\n"
    )
    busy = tmp_path / "busy"
    with running(program) as process:
        payload = in_thread(f"import time; open({str(busy)!r}, 'w'); time.sleep(0.5)")
        run_injector(look_up(process.pid), payload)
        until(busy.exists)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == "delivered\n"


def test_signals_that_arrive_during_the_injection_are_delivered(tmp_path: Path) -> None:
    """One after the other, each awaited: a lost one would be waited for in vain."""
    seen = tmp_path / "seen"
    program = (
        "import signal, sys, time\n"
        f"log = open({str(seen)!r}, 'ab', buffering=0)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: log.write(b'x'))\n"
        "print('up', flush=True)\n"
        "while True:\n    sum(range(100))\n"
    )
    with running(program) as process:
        facts, stop, sent = look_up(process.pid), threading.Event(), 0
        failures: list[str] = []

        def pester() -> None:
            nonlocal sent
            while not stop.is_set():
                process.send_signal(signal.SIGUSR1)
                sent += 1
                deadline = time.monotonic() + 10
                while seen.stat().st_size < sent:
                    if time.monotonic() > deadline:
                        failures.append(f"signal {sent} was lost")
                        return

        thread = threading.Thread(target=pester)
        thread.start()
        for _ in range(10):
            run_injector(facts, in_thread("pass"))
        stop.set()
        thread.join()
        assert failures == []
        assert sent > 100
        assert seen.stat().st_size == sent


def test_a_sleep_is_not_cut_short_and_the_statement_waits_for_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = (
        "import time\nprint('up', flush=True)\nstarted = time.monotonic()\ntime.sleep(2)\n"
        "print(time.monotonic() - started, flush=True)\ntime.sleep(0.5)\n"
    )
    with running(program) as process:
        until(lambda: look_up(process.pid).state == "S")
        run_injector(look_up(process.pid), marking(mark))
        time.sleep(0.3)
        assert not mark.exists()
        assert process.stdout is not None
        assert 2.0 <= float(process.stdout.readline()) < 4.0
        until(mark.exists)


def test_a_static_interpreter_wins_over_a_library_opened_later(tmp_path: Path) -> None:
    """Calling into the second image corrupted the heap."""
    static = next((p for p in interpreters() if b"libpython3." not in subprocess.check_output(["ldd", p])), None)
    if static is None:
        pytest.skip("no statically linked interpreter here")
    version = subprocess.check_output([static, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    pattern = f"/lib/libpython{version.strip()}.so.1.0"
    library = next(iter(glob(os.path.expanduser("~/.pyenv/versions/*") + pattern) + glob("/usr" + pattern)), None)
    if library is None:
        pytest.skip(f"no {pattern} to open beside it")
    mark = tmp_path / "mark"
    mark.touch()
    with running(f"import ctypes\nctypes.CDLL({library!r})\n" + NOISY, python=static) as process:
        facts = look_up(process.pid)
        assert library in Path(f"/proc/{process.pid}/maps").read_text()
        for _ in range(5):
            assert os.path.samefile(run_injector(facts, marking(mark))["image"], static)
        until(lambda: mark.stat().st_size == 5)
        assert progresses(process)


@pytest.mark.parametrize("moment", ["before it is told", "attached", "stopped"])
def test_the_helper_killed_outside_its_critical_window(moment: str) -> None:
    with running(NOISY) as process:
        facts = look_up(process.pid)
        if moment == "before it is told":
            command = [sys.executable, "-m", "mxprobe.attach.injector", str(facts.pid), str(facts.start_ticks)]
            helper = subprocess.Popen(command, stdin=subprocess.PIPE)
            time.sleep(0.3)
            helper.kill()
            helper.communicate()
        else:
            with running(HOLD_STOPPED, str(process.pid), "stop" if moment == "stopped" else "seize") as helper:
                pass
        assert progresses(process)


def test_a_pid_that_was_reused_is_left_alone() -> None:
    with running(NOISY) as process:
        facts = look_up(process.pid)
        object.__setattr__(facts, "start_ticks", facts.start_ticks - 1)
        with pytest.raises(AttachError, match="belongs to another process") as error:
            run_injector(facts, in_thread("raise SystemExit"))
        assert error.value.reason == "exited"
        assert progresses(process)


def refusal(*arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    done = mxprobe(*arguments, prefix=prefix)
    assert done.stdout == ""
    return done.returncode, done.stderr


@contextmanager
def noisy(**options: object) -> Generator[subprocess.Popen[str]]:
    with running(NOISY, **options) as process:  # pyright: ignore[reportArgumentType]
        yield process
        assert progresses(process), "the refusal harmed it"


def test_suspended(tmp_path: Path) -> None:
    with noisy() as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: look_up(process.pid).state == "T")
        code, words = refusal("attach", str(process.pid))
        assert code == 4
        assert "is suspended" in words
        process.send_signal(signal.SIGCONT)


def test_another_debugger_holds_it() -> None:
    with noisy() as process, running(HOLD_STOPPED, str(process.pid), "seize") as debugger:
        with pytest.raises(AttachError, match=f"already traced by process {debugger.pid}") as error:
            check_ptrace(look_up(process.pid))
        assert error.value.reason == "being_traced"
        code, words = refusal("attach", str(process.pid))
        assert code == 4
        assert "already traced" in words


def test_remote_debugging_disabled() -> None:
    with noisy(env={**os.environ, "PYTHON_DISABLE_REMOTE_DEBUG": "1"}) as process:
        code, words = refusal("attach", str(process.pid))
        assert code == 4
        assert "PYTHON_DISABLE_REMOTE_DEBUG" in words


def test_not_python() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        code, words = refusal("attach", str(child.pid))
        assert code == 4
        assert "(sleep) is not a CPython interpreter" in words
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not (AS_ROOT and shutil.which("setpriv")), reason="needs root and setpriv")
def test_process_of_another_user() -> None:
    python = next((p for p in interpreters() if p.startswith("/usr/bin")), None)
    if python is None:
        pytest.skip("no interpreter that another user may run")
    prefix = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    with noisy(python=python, prefix=prefix) as process:
        code, words = refusal("attach", str(process.pid))
        assert code == 4
        assert "belongs to nobody" in words
        assert f"sudo -u nobody mxprobe attach {process.pid}" in words


@pytest.mark.skipif(not (AS_ROOT and shutil.which("setpriv")), reason="needs root and setpriv")
def test_container_without_the_capability() -> None:
    """As in a container: root, but without SYS_PTRACE, against a process that has more than we."""
    with noisy() as process:
        prefix = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
        code, words = refusal("attach", str(process.pid), prefix=prefix)
        assert code == 4
        assert "does not let mxprobe trace" in words
        assert "SYS_PTRACE" in words
