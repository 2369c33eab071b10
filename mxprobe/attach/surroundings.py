"""What the kernel and the container allow, read from /proc: facts that decide which ways in are open, with remedies."""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mxprobe.attach import gdb
from mxprobe.attach.elf import ImageError, find_python, read_maps
from mxprobe.attach.injector import FUNCTIONS

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


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` is None for a plain fact; `remedy` says what to do where it stands in the way."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def surroundings() -> list[Finding]:
    """Permissions, namespaces, settings against debugging, and how this interpreter is built."""
    capable = has_ptrace_capability(Path("/proc/self/status").read_text())
    return [
        yama(_read("/proc/sys/kernel/yama/ptrace_scope"), capable=capable),
        Finding("CAP_SYS_PTRACE", None, "yes" if capable else "no"),
        pid_namespace(Path("/proc/self/status").read_text()),
        container(),
        dumpable(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)),
        remote_debugging(dict(os.environ)),
        interpreter(),
        Finding("gdb", None, "installed" if gdb.is_here() else "not installed; used where ptrace of ours cannot be"),
    ]


def yama(scope: str | None, *, capable: bool) -> Finding:
    """`scope` is the content of ptrace_scope, None without Yama."""
    if scope is None:
        return Finding("yama ptrace_scope", True, "no Yama in this kernel: processes of the same user may be traced")
    open_here = scope == "0" or (scope in ("1", "2") and capable)
    detail = f"{scope}: {_SCOPES.get(scope, 'unknown')}"
    if open_here:
        return Finding("yama ptrace_scope", True, detail)
    how = "nothing can be done before a reboot" if scope == "3" else f"sudo sysctl kernel.yama.ptrace_scope=0; {_GRANT}"
    return Finding("yama ptrace_scope", False, detail, f"{how}; {_RUN}")


def has_ptrace_capability(status: str) -> bool:
    """From the text of /proc/self/status."""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_PTRACE & 1)


def pid_namespace(status: str) -> Finding:
    """From the text of /proc/self/status."""
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    if os.readlink("/proc/self") != str(os.getpid()):
        remedy = "run mxprobe where the job runs: docker exec, kubectl exec, or nsenter -t PID -m -p"
        return Finding("PID namespace", False, "/proc shows another one than this process is in", remedy)
    depth = len(numbers)
    detail = "that of the host, as far as can be seen" if depth <= 1 else f"nested {depth - 1} deep"
    return Finding("PID namespace", True, detail)


def container() -> Finding:
    marks = [name for name in ("/.dockerenv", "/run/.containerenv") if os.path.exists(name)]
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        marks.append("KUBERNETES_SERVICE_HOST")
    if not marks:
        return Finding("container", None, "no sign of one")
    return Finding("container", None, f"yes ({', '.join(marks)}); jobs must be attached from inside the same one")


def dumpable(value: int) -> Finding:
    """`value` is what prctl(PR_GET_DUMPABLE) answers for this process; jobs started the same way have it too."""
    if value == 1:
        return Finding("dumpable", True, "processes started here may be traced by their user")
    remedy = f"start jobs without set-uid or prctl(PR_SET_DUMPABLE, 0), or attach as root: sudo; {_RUN}"
    return Finding("dumpable", False, f"{value}: processes started here hide from their user", remedy)


def remote_debugging(environ: dict[str, str]) -> Finding:
    if environ.get("PYTHON_DISABLE_REMOTE_DEBUG"):
        remedy = "unset PYTHON_DISABLE_REMOTE_DEBUG where jobs are started; mxprobe honours it for every way in"
        return Finding("remote debugging", False, "disabled by PYTHON_DISABLE_REMOTE_DEBUG", remedy)
    return Finding("remote debugging", True, "not disabled in this environment")


def interpreter() -> Finding:
    """How this interpreter is built; jobs of the same environment run the same."""
    try:
        image = find_python(os.getpid(), read_maps(os.getpid()), FUNCTIONS, machine=None)
    except (ImageError, OSError) as error:
        detail = getattr(error, "detail", str(error))
        return Finding("interpreter", False, f"no image that exports the functions needed ({detail})", _RUN[3:])
    static = "libpython" not in os.path.basename(image.path)
    threaded = not getattr(sys, "_is_gil_enabled", lambda: True)()
    if threaded:
        return Finding("interpreter", False, "a free-threaded build", "run jobs on a Python with the GIL")
    return Finding("interpreter", True, f"{'one static image' if static else 'a shared library'}, {image.path}")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
