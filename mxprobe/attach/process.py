"""Facts about a process, read from /proc: who it is, whose, in which state, and what its main thread does."""

import os
import pwd
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxprobe.attach.refusals import refuse
from mxprobe.errors import AttachError

_EXIT_GRACE_S = 2.0
_DYING_S = 1.0
# x86_64 system calls in which a training process is usually found waiting.
_SYSCALLS = {
    0: "read",
    1: "write",
    7: "poll",
    16: "ioctl",
    23: "select",
    35: "nanosleep",
    43: "accept",
    45: "recvfrom",
    47: "recvmsg",
    61: "wait4",
    74: "fsync",
    202: "futex (waiting for a lock or another thread)",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
}
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "suspended",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
}


@dataclass(frozen=True)
class Process:
    """One process as /proc showed it. `start_ticks` (clock ticks since boot) tells it from a later one of that PID."""

    pid: int
    start_ticks: int
    state: str
    parent_pid: int
    uid: int
    tracer_pid: int
    inner_pid: int
    """Its PID in its own namespace, which is what `os.getpid()` returns there."""
    command_line: tuple[str, ...]
    environ: dict[str, str]
    """As it was when the process started; empty where /proc does not show it."""

    @property
    def name(self) -> str:
        """A short name for files: the script's stem, else the module after -m, else the program's name."""
        for before, word in zip(("", *self.command_line), self.command_line, strict=False):
            if before == "-m" and word:
                return word.rsplit(".", 1)[-1]
            if word.endswith(".py"):
                return Path(word).stem
        return Path(self.command_line[0]).name if self.command_line else "process"

    @property
    def owner(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return f"user {self.uid}"

    def is_same_and_alive(self) -> bool:
        """Return True while the process that had this PID when the facts were read still runs."""
        try:
            state, start_ticks = _stat(self.pid)
        except OSError:
            return False
        return start_ticks == self.start_ticks and state not in "ZX"


class Liveness:
    """Whether the process that is attached is still that process, and alive."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._died_at = float("-inf")

    def lives_on(self) -> bool:
        """Return False if it is gone, or ends in a moment: the kernel closes its connections before it is dead."""
        deadline = time.monotonic() + _DYING_S
        while self._process.is_same_and_alive():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.02)
        return False

    def is_long_dead(self) -> bool:
        """Return True once it has been dead for a while. Until then its connection is given time to end first.

        A forked child that still holds the connection would keep it open for ever.
        """
        if self._process.is_same_and_alive():
            self._died_at = float("-inf")
        elif self._died_at < 0:
            self._died_at = time.monotonic()
        return self._died_at > 0 and time.monotonic() - self._died_at > _EXIT_GRACE_S


def look_up(pid: int) -> Process:
    """Return the facts of a live process. AttachError `no_such_process`, `not_a_process` or `exited` otherwise."""
    proc = Path("/proc", str(pid))
    try:
        state, start_ticks = _stat(pid)
        status = {
            key: value.split()
            for key, _, value in (line.partition(":") for line in (proc / "status").read_text().splitlines())
        }
        command_line = tuple(os.fsdecode(w) for w in (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0") if w)
    except OSError:
        raise refuse("no_such_process", pid) from None
    if int(status["Tgid"][0]) != pid:
        raise refuse("not_a_process", pid, status["Tgid"][0])
    if state in "ZX":
        raise refuse("exited", pid, _STATES[state])
    return Process(
        pid=pid,
        start_ticks=start_ticks,
        state=state,
        parent_pid=int(status["PPid"][0]),
        uid=int(status["Uid"][1]),
        tracer_pid=int(status["TracerPid"][0]),
        inner_pid=int(status.get("NSpid", [str(pid)])[-1]),
        command_line=command_line or (status["Name"][0],),
        environ=_environ(proc),
    )


def own_processes() -> list[Process]:
    """Return every live process of this user, by PID. Those that end meanwhile are left out."""
    found: list[Process] = []
    for entry in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            process = look_up(entry)
        except AttachError:
            continue
        if process.uid == os.geteuid():
            found.append(process)
    return found


def is_python(process: Process) -> bool:
    """Return True if it runs a Python interpreter, by the name of its executable or of a library it has mapped."""
    try:
        name = os.path.basename(os.readlink(f"/proc/{process.pid}/exe"))
        return name.startswith("python") or "/libpython" in Path("/proc", str(process.pid), "maps").read_text()
    except OSError:
        return False


def interpreter_options(command: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options of `python [options] PROGRAM ...` and their values: ("-X", "dev"), ("-u", ""), ("-m", M)."""
    found: list[tuple[str, str]] = []
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "-c"):
            break
        takes_value = word[:2] in ("-X", "-W", "-m")
        found.append((word[:2], word[2:] or next(words, "")) if takes_value else (word, ""))
        if word.startswith("-m"):
            break
    return found


def check_attachable(process: Process) -> None:
    """Raise the AttachError that applies to every mechanism: namespace, owner, suspended, debugging forbidden."""
    pid = process.pid
    if os.readlink("/proc/self") != str(os.getpid()):
        raise refuse("pid_namespace", pid)
    if process.uid != os.geteuid():
        raise refuse("other_user", pid, process.owner)
    if process.state == "T":
        raise refuse("stopped", pid)
    if how := _debugging_disabled(process):
        raise refuse("remote_debugging_disabled", pid, how)


def main_thread_activity(pid: int) -> str:
    """Return in a few words what the main thread does: its state, and the system call it waits in if that shows."""
    try:
        state, _ = _stat(pid)
        call = Path("/proc", str(pid), "syscall").read_text().split()
    except OSError:
        return "not visible"
    if state == "R" or not call[0].isdigit():
        return "running native code or Python" if state == "R" else _STATES.get(state, state)
    name = _SYSCALLS.get(int(call[0]), f"system call {call[0]}")
    return f"{_STATES.get(state, state)} in {name}"


def _stat(pid: int) -> tuple[str, int]:
    # The command in parentheses may itself contain spaces and parentheses: count fields after the last one.
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _environ(proc: Path) -> dict[str, str]:
    try:
        entries = (proc / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _debugging_disabled(process: Process) -> str:
    """Return how PEP 768's opt-out was given to that interpreter, or an empty string."""
    if ("-X", "disable-remote-debug") in interpreter_options(process.command_line):
        return "-X disable-remote-debug"
    if process.environ.get("PYTHON_DISABLE_REMOTE_DEBUG"):
        return "PYTHON_DISABLE_REMOTE_DEBUG"
    return ""
