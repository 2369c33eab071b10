"""Which ways in work on this machine: found by trying them on a process of our own."""

import contextlib
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from mxprobe._version import __version__
from mxprobe.attach.helper import check_ptrace, run_injector
from mxprobe.attach.payload import in_thread
from mxprobe.attach.process import look_up
from mxprobe.attach.rundir import clean_stale, listener_socket_of
from mxprobe.attach.startup_hook import hook_path
from mxprobe.attach.surroundings import Finding, surroundings
from mxprobe.errors import MxprobeError
from mxprobe.listener import private_directory
from mxprobe_kernels.build_cpu import instruction_sets

_STARTED_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 5.0
_SLEEPER = "import os, time\nos.write({started}, b'.')\nwhile True: time.sleep(0.05)"


def diagnose() -> list[Finding]:
    """Facts, then the two ways in (`listener`, `ptrace`), each tried for real. Takes about a second."""
    return [
        Finding("mxprobe", None, f"{__version__} in {Path(__file__).parent.parent}"),
        Finding("python", None, f"{platform.python_version()} at {sys.executable}"),
        Finding("torch", None, _version_of("torch")),
        _cpu_kernels(),
        Finding("system", None, f"{platform.system()} {platform.release()} {platform.machine()}"),
        *surroundings(),
        Finding("start-up hook", None, f"installed: {hook_path()}" if hook_path().exists() else "not installed"),
        _private_directory(),
        _listener(),
        _ptrace(),
    ]


def ways_in(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.name in ("listener", "ptrace") and finding.ok]


def _cpu_kernels() -> Finding:
    found = instruction_sets()
    if found:
        return Finding("CPU kernels", None, f"built, for {found.replace(',', ', ')}; shipped with the agent")
    remedy = "install g++ and run `python -m mxprobe_kernels.build_cpu`"
    return Finding("CPU kernels", None, "not built: torch computes on CPUs, a hundred times slower", remedy)


def _private_directory() -> Finding:
    try:
        return Finding("private directory", True, private_directory(os.environ, reserve_bytes=48))
    except PermissionError as error:
        remedy = "set TMPDIR or XDG_RUNTIME_DIR to a directory of your own, the same for job and mxprobe"
        return Finding("private directory", False, str(error), remedy)


def _listener() -> Finding:
    startup = Path(__file__).with_name("startup")
    environ = {**os.environ, "MXPROBE_LISTEN": "1", "PYTHONPATH": str(startup)}
    with _sleeper(environ) as (child, errors):
        if child is None:
            return Finding("listener", False, errors)
        path = listener_socket_of(look_up(child.pid))
    clean_stale()
    if path is None:
        return Finding("listener", False, errors or "a job started by `mxprobe run` did not open its socket")
    return Finding("listener", True, "jobs started with `mxprobe run -- ...` can be attached")


def _ptrace() -> Finding:
    reading, writing = os.pipe()
    try:
        with _sleeper(dict(os.environ), keep=writing) as (child, errors):
            if child is None:
                return Finding("ptrace", False, errors)
            try:
                process = look_up(child.pid)
                check_ptrace(process)
                answer = run_injector(process, in_thread(f"import os; os.write({writing}, b'x')"))
            except MxprobeError as error:
                return Finding("ptrace", False, f"{error.what} ({error.cause})", error.remedy)
            if not select.select([reading], [], [], _ANSWER_TIMEOUT_S)[0]:
                return Finding("ptrace", False, "queued, but the test process did not run it")
    finally:
        os.close(reading)
        os.close(writing)
    return Finding(
        "ptrace", True, f"running processes can be attached; main thread stopped {answer['pause_ms']:.1f} ms"
    )


@contextmanager
def _sleeper(environ: dict[str, str], keep: int = -1) -> Generator[tuple[subprocess.Popen[bytes] | None, str]]:
    """A Python process of ours that has started and sleeps; (None, why) if it did not start."""
    reading, started = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER.format(started=started)],
        env=environ,
        pass_fds=[fd for fd in (started, keep) if fd >= 0],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(started)
    try:
        ready = select.select([reading], [], [], _STARTED_TIMEOUT_S)[0] and os.read(reading, 1)
        time.sleep(0.05)
        yield (child, "") if ready else (None, "a Python process of ours did not start")
    finally:
        os.close(reading)
        child.kill()
        child.wait()


def _version_of(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"
