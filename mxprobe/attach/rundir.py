"""The private directory of one attachment: `BASE/mxprobe-UID/PID.START/` with control socket and archive.

Its owner holds a lock on it for as long as it lives. A directory whose lock is free is a leftover and is removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mxprobe.attach.page_record import SUFFIX as PAGES_SUFFIX
from mxprobe.attach.page_record import PageRecord
from mxprobe.attach.process import Process, look_up
from mxprobe.attach.refusals import refuse
from mxprobe.errors import AttachError
from mxprobe.listener import base_directories, is_private, private_directory

_LOCK = "lock"
_SOCKET = "control.sock"
_SCRIPT_SUFFIX = ".script"
_OF_ONE_PROCESS = (".listen.sock", PAGES_SUFFIX, _SCRIPT_SUFFIX)
_UNFINISHED = ".new-"
_UNFINISHED_S = 60.0
_LONGEST_NAME_BYTES = 48  # "/4194304.18446744073709551615/control.sock"


class RunDirectory:
    """The private directory of one attachment. `create` makes it and `close` removes it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @property
    def control_socket(self) -> Path:
        return self.path / _SOCKET

    @property
    def archive(self) -> Path:
        return self.path / "agent.zip"

    @property
    def page_record(self) -> PageRecord:
        """The record of its pages. It lies beside the directory, for it stays as long as there are pages."""
        return PageRecord(self.path.with_name(self.path.name + PAGES_SUFFIX))

    @property
    def script(self) -> Path:
        """What `sys.remote_exec` is told to run. It lies beside the directory too: one that runs late must find it."""
        return self.path.with_name(self.path.name + _SCRIPT_SUFFIX)

    @classmethod
    def create(cls, process: Process) -> "RunDirectory":
        """Make a fresh directory for that process. AttachError `already_attached` while another one is in use."""
        clean_stale()
        parent = Path(private_directory(os.environ, reserve_bytes=_LONGEST_NAME_BYTES))
        if _find(process) is not None:
            raise refuse("already_attached", process.pid)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
        lock = _try_lock(unfinished, create=True)
        final = parent / _name(process)
        try:
            if lock is None:
                raise OSError("a lock just made is taken")
            unfinished.rename(final)
        except OSError:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise refuse("already_attached", process.pid) from None
        return cls(final, lock)

    def visible_to(self, process: Process) -> bool:
        """Return True if the process, in its own mount namespace and root, finds this very directory at this path."""
        try:
            there, here = os.stat(f"/proc/{process.pid}/root{self.path}"), self.path.stat()
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def attached() -> list[tuple[int, Path]]:
    """Return (PID, control socket) of every attachment of this user that has a living controller."""
    found: dict[int, Path] = {}
    for directory in _directories():
        if _in_use(directory):
            found.setdefault(int(directory.name.partition(".")[0]), directory / _SOCKET)
    return sorted(found.items())


def control_socket_of(pid: int) -> Path | None:
    """Return the control socket of the attachment to that process, or None if there is none."""
    try:
        directory = _find(look_up(pid))
    except AttachError:
        return next((path for attached_pid, path in attached() if attached_pid == pid), None)
    return None if directory is None else directory / _SOCKET


def clean_stale() -> list[Path]:
    """Remove what controllers and listeners that were killed left behind; returns what was removed."""
    removed: list[Path] = []
    for directory in _directories(unfinished=True):
        if directory.name.startswith(_UNFINISHED) and not _is_old(directory):
            continue  # its maker may have the lock file, and not yet the lock
        lock = _try_lock(directory)
        made_without_lock = _is_old(directory) and not (directory / _LOCK).exists()  # its maker was killed in between
        if lock is None and not made_without_lock:
            continue
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        removed.append(directory)
    for parent in _parents(os.environ):
        for leftover in parent.iterdir():
            if leftover.name.endswith(_OF_ONE_PROCESS) and _is_of_the_dead(leftover.name):
                with contextlib.suppress(OSError):
                    leftover.unlink()
                    removed.append(leftover)
    return removed


def listener_socket_of(process: Process) -> Path | None:
    """Return the socket on which the job itself listens, wherever its environment or ours would have put it."""
    paths = (parent / f"{process.inner_pid}.listen.sock" for parent in _parents(process.environ, os.environ))
    return next((path for path in paths if path.is_socket()), None)


def _is_of_the_dead(name: str) -> bool:
    """Return True for `PID.listen.sock` and `PID.START.pages` of a process that is gone."""
    pid, start_ticks, *_ = name.split(".")
    if not Path("/proc", pid).exists():
        return True
    try:
        return start_ticks.isdigit() and look_up(int(pid)).start_ticks != int(start_ticks)
    except (AttachError, ValueError):
        return True


def _name(process: Process) -> str:
    return f"{process.pid}.{process.start_ticks}"


def _find(process: Process) -> Path | None:
    directories = (parent / _name(process) for parent in _parents(os.environ, process.environ))
    return next((directory for directory in directories if _in_use(directory)), None)


def _parents(*environs: Mapping[str, str]) -> Iterator[Path]:
    """Yield the private directories that there are where these environments put them, each once."""
    bases = dict.fromkeys(base for environ in environs for base in base_directories(environ))
    parents = (os.path.join(base, f"mxprobe-{os.getuid()}") for base in bases)
    yield from (Path(parent) for parent in parents if is_private(parent))


def _directories(*, unfinished: bool = False) -> Iterator[Path]:
    for parent in _parents(os.environ):
        for entry in sorted(parent.iterdir()):
            named = entry.name.partition(".")[0].isdigit() and not entry.name.endswith(".sock")
            if entry.is_dir() and (named or (unfinished and entry.name.startswith(_UNFINISHED))):
                yield entry


def _in_use(directory: Path) -> bool:
    lock = _try_lock(directory)
    if lock is not None:
        os.close(lock)
        return False
    return (directory / _LOCK).exists()


def _is_old(directory: Path) -> bool:
    try:
        return time.time() - directory.stat().st_mtime > _UNFINISHED_S
    except OSError:
        return False


def _try_lock(directory: Path, *, create: bool = False) -> int | None:
    """Return a descriptor that holds the directory's lock, or None if another holds it or there is no lock file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        descriptor = os.open(directory / _LOCK, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
