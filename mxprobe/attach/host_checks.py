"""Which ways in work on this machine: what the kernel and the container allow, read from /proc, and a try of each way.

Each obstacle comes with its remedy.
"""

import contextlib
import ctypes
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mxprobe._version import __version__
from mxprobe.attach import gdb
from mxprobe.attach.elf import ImageError, find_python, read_maps
from mxprobe.attach.injector import FUNCTIONS
from mxprobe.attach.injector_process import check_ptrace, run_injector
from mxprobe.attach.payload import in_thread
from mxprobe.attach.process import look_up
from mxprobe.attach.rundir import clean_stale, listener_socket_of
from mxprobe.attach.startup_hook import hook_path
from mxprobe.errors import MxprobeError
from mxprobe.host_compat import has_gil
from mxprobe.listener import private_directory
from mxprobe_kernels.build_cpu import instruction_sets

_CAP_SYS_PTRACE = 19
_PR_GET_DUMPABLE = 3
_GRANT = (
    "docker run --cap-add=SYS_PTRACE; Kubernetes: securityContext.capabilities.add: [SYS_PTRACE], or an ephemeral "
    "container: kubectl debug POD --profile=sysadmin --target=CONTAINER"
)
_RUN = "or start jobs with `mxprobe run -- ...`, which needs no permission"
_SCOPES = {
    "0": "processes of the same user may be traced",
    "1": "only children may be traced, or with CAP_SYS_PTRACE",
    "2": "only with CAP_SYS_PTRACE",
    "3": "nobody may trace, until the next boot",
}
_STARTED_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 5.0
_MARKS = {True: "ok", False: "NO", None: "  "}
_NOT_STARTED = "a Python process of ours did not start"
_SLEEPER = "import os, time\nos.write(1, b'.')\nwhile True: time.sleep(0.05)"


@dataclass(frozen=True)
class HostCheck:
    """One line of the report. `ok` is None for a plain fact; `remedy` says what to do where it stands in the way."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{_MARKS[self.ok]}  {self.name:18} {self.detail}"


def check_host() -> list[HostCheck]:
    """Return facts, then the two ways in (`listener`, `ptrace`), each tried for real. This takes about a second."""
    return [
        HostCheck("mxprobe", None, f"{__version__} in {Path(__file__).parent.parent}"),
        HostCheck("python", None, f"{platform.python_version()} at {sys.executable}"),
        HostCheck("torch", None, _version_of("torch")),
        _cpu_kernels(),
        HostCheck("system", None, f"{platform.system()} {platform.release()} {platform.machine()}"),
        *check_permissions(),
        HostCheck("start-up hook", None, f"installed: {hook_path()}" if hook_path().exists() else "not installed"),
        _private_directory(),
        _listener(),
        _ptrace(),
    ]


def ways_in(findings: list[HostCheck]) -> list[str]:
    return [finding.name for finding in findings if finding.name in ("listener", "ptrace") and finding.ok]


def check_permissions() -> list[HostCheck]:
    """Return permissions, namespaces, settings against debugging, and how this interpreter is built."""
    capable = has_ptrace_capability(Path("/proc/self/status").read_text())
    return [
        yama(_read("/proc/sys/kernel/yama/ptrace_scope"), capable=capable),
        HostCheck("CAP_SYS_PTRACE", None, "yes" if capable else "no"),
        pid_namespace(Path("/proc/self/status").read_text()),
        container(),
        dumpable(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)),
        remote_debugging(dict(os.environ)),
        interpreter(),
        HostCheck("gdb", None, "installed" if gdb.is_here() else "not installed; used where ptrace of ours cannot be"),
    ]


def yama(scope: str | None, *, capable: bool) -> HostCheck:
    """Check Yama's policy. `scope` is the content of ptrace_scope, None without Yama."""
    if scope is None:
        return HostCheck("yama ptrace_scope", True, "no Yama in this kernel: processes of the same user may be traced")
    detail = f"{scope}: {_SCOPES.get(scope, 'unknown')}"
    if scope == "0" or (scope in ("1", "2") and capable):
        return HostCheck("yama ptrace_scope", True, detail)
    how = "nothing can be done before a reboot" if scope == "3" else f"sudo sysctl kernel.yama.ptrace_scope=0; {_GRANT}"
    return HostCheck("yama ptrace_scope", False, detail, f"{how}; {_RUN}")


def has_ptrace_capability(status: str) -> bool:
    """Return whether CAP_SYS_PTRACE is effective, by the text of /proc/self/status."""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_PTRACE & 1)


def pid_namespace(status: str) -> HostCheck:
    """Check how deep this process is nested, by the text of /proc/self/status."""
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    if os.readlink("/proc/self") != str(os.getpid()):
        remedy = "run mxprobe where the job runs: docker exec, kubectl exec, or nsenter -t PID -m -p"
        return HostCheck("PID namespace", False, "/proc shows another one than this process is in", remedy)
    depth = len(numbers) - 1
    detail = "that of the host, as far as can be seen" if depth <= 0 else f"nested {depth} deep"
    return HostCheck("PID namespace", True, detail)


def container() -> HostCheck:
    marks = [name for name in ("/.dockerenv", "/run/.containerenv") if os.path.exists(name)]
    marks += ["KUBERNETES_SERVICE_HOST"] if os.environ.get("KUBERNETES_SERVICE_HOST") else []
    if not marks:
        return HostCheck("container", None, "no sign of one")
    return HostCheck("container", None, f"yes ({', '.join(marks)}); jobs must be attached from inside the same one")


def dumpable(value: int) -> HostCheck:
    """Check what prctl(PR_GET_DUMPABLE) answers for this process; jobs started the same way have that `value` too."""
    if value == 1:
        return HostCheck("dumpable", True, "processes started here may be traced by their user")
    remedy = f"start jobs without set-uid or prctl(PR_SET_DUMPABLE, 0), or attach as root: sudo; {_RUN}"
    return HostCheck("dumpable", False, f"{value}: processes started here hide from their user", remedy)


def remote_debugging(environ: dict[str, str]) -> HostCheck:
    if environ.get("PYTHON_DISABLE_REMOTE_DEBUG"):
        remedy = "unset PYTHON_DISABLE_REMOTE_DEBUG where jobs are started; mxprobe honours it for every way in"
        return HostCheck("remote debugging", False, "disabled by PYTHON_DISABLE_REMOTE_DEBUG", remedy)
    return HostCheck("remote debugging", True, "not disabled in this environment")


def interpreter() -> HostCheck:
    """Check how this interpreter is built; jobs of the same environment run the same."""
    try:
        image = find_python(os.getpid(), read_maps(os.getpid()), FUNCTIONS, machine=None)
    except (ImageError, OSError) as error:
        detail = getattr(error, "detail", str(error))
        return HostCheck("interpreter", False, f"no image that exports the functions needed ({detail})", _RUN[3:])
    if not has_gil():
        return HostCheck("interpreter", False, "a free-threaded build", "run jobs on a Python with the GIL")
    static = "libpython" not in os.path.basename(image.path)
    return HostCheck("interpreter", True, f"{'one static image' if static else 'a shared library'}, {image.path}")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpu_kernels() -> HostCheck:
    found = instruction_sets()
    if found:
        return HostCheck("CPU kernels", None, f"built, for {found.replace(',', ', ')}; shipped with the agent")
    remedy = "install g++ and run `python -m mxprobe_kernels.build_cpu`"
    return HostCheck("CPU kernels", None, "not built: torch computes on CPUs, a hundred times slower", remedy)


def _private_directory() -> HostCheck:
    try:
        return HostCheck("private directory", True, private_directory(os.environ, reserve_bytes=48))
    except PermissionError as error:
        remedy = "set TMPDIR or XDG_RUNTIME_DIR to a directory of your own, the same for job and mxprobe"
        return HostCheck("private directory", False, str(error), remedy)


def _listener() -> HostCheck:
    startup = Path(__file__).with_name("startup")
    environ = {**os.environ, "MXPROBE_LISTEN": "1", "PYTHONPATH": str(startup)}
    with _sleeper(environ) as child:
        if child is None:
            return HostCheck("listener", False, _NOT_STARTED)
        path = listener_socket_of(look_up(child.pid))
    clean_stale()
    if path is None:
        return HostCheck("listener", False, "a job started by `mxprobe run` did not open its socket")
    return HostCheck("listener", True, "jobs started with `mxprobe run -- ...` can be attached")


def _ptrace() -> HostCheck:
    reading, writing = os.pipe()
    try:
        with _sleeper(dict(os.environ), keep=(writing,)) as child:
            if child is None:
                return HostCheck("ptrace", False, _NOT_STARTED)
            try:
                process = look_up(child.pid)
                check_ptrace(process)
                answer = run_injector(process, in_thread(f"import os; os.write({writing}, b'x')"))
            except MxprobeError as error:
                return HostCheck("ptrace", False, f"{error.what} ({error.cause})", error.remedy)
            if not select.select([reading], [], [], _ANSWER_TIMEOUT_S)[0]:
                return HostCheck("ptrace", False, "queued, but the test process did not run it")
    finally:
        os.close(reading)
        os.close(writing)
    pause = f"main thread stopped {answer['pause_ms']:.1f} ms"
    return HostCheck("ptrace", True, f"running processes can be attached; {pause}")


@contextmanager
def _sleeper(environ: dict[str, str], keep: tuple[int, ...] = ()) -> Generator[subprocess.Popen[bytes] | None]:
    """Yield a Python process of ours that has started and sleeps; None if it did not start."""
    child = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER],
        env=environ,
        pass_fds=keep,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    try:
        ready = select.select([child.stdout], [], [], _STARTED_TIMEOUT_S)[0] and child.stdout.read(1)
        time.sleep(0.05)
        yield child if ready else None
    finally:
        child.kill()
        child.communicate()


def _version_of(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"
