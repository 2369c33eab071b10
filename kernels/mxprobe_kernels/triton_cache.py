# pyright: basic
"""Where Triton keeps what is compiled for us: a private directory on a local disk, and not the home of many machines.

Triton has one cache manager for a whole process and no argument of a launch or a compilation for another. `local_cache`
puts one in its place that looks at who asks: the thread that is inside the `with` gets files in our directory, every
other thread what it would have got without us. No environment variable is set, no key of any cache changes (none
depends on the place), and on the way out the former manager is put back.

Left alone where somebody has chosen: TRITON_CACHE_DIR, TRITON_HOME, TRITON_CACHE_MANAGER or a knob of `triton.knobs`.
Written against triton 3.2 (a variable of `triton.runtime.cache`) and 3.4 to 3.9 (`triton.knobs.cache`).
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Callable

from triton.runtime import cache

CHOICES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER")
_KNOBS = ("dir", "home_dir", "manager_class")
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"),
    *("9p", "afs", "wekafs", "panfs"),
)
FALLBACKS = ("/tmp", "/var/tmp")
_MOUNTS = "/proc/mounts"


@contextmanager
def local_cache() -> Generator[str, None, None]:
    """Keep what this thread compiles inside in the directory yielded; "" where the process's choice stands."""
    directory = "" if is_chosen() else local_directory()
    if not directory:
        yield ""
        return
    names, key, usual = _place()
    manager = _by_thread(threading.get_ident(), directory, usual)
    absent = object()
    before = names.get(key, absent)
    names[key] = manager
    try:
        yield directory
    finally:
        if names.get(key) is manager:  # else the run has set one of its own meanwhile
            if before is absent:
                del names[key]
            else:
                names[key] = before


def is_chosen() -> bool:
    """Return whether the user, or a library of theirs, has said where this process keeps what Triton compiles."""
    own = vars(_knobs().cache) if _knobs() is not None else {}
    return any(os.environ.get(name) for name in CHOICES) or any(own.get(name) is not None for name in _KNOBS)


def local_directory() -> str:
    """Make `BASE/mxprobe-triton-UID`, mode 0700, on the first base that is no network file system; "" without one."""
    for base in dict.fromkeys((tempfile.gettempdir(), *FALLBACKS)):
        directory = os.path.join(base, f"mxprobe-triton-{os.getuid()}")
        if file_system_of(base) in NETWORK:
            continue
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            found = os.lstat(directory)
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return directory
    return ""


def file_system_of(path: str, mounts: str = _MOUNTS) -> str:
    """Return the file system's type by the kernel's table, e.g. `nfs4`; "" where that cannot be read."""
    path, best = os.path.realpath(path), ("", "")
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    for _, point, kind, *_ in (line for line in lines if len(line) > 2):
        point = point.replace("\\040", " ")
        within = path == point or path.startswith(point.rstrip("/") + "/")
        if within and len(point) >= len(best[0]):
            best = point, kind
    return best[1]


def _knobs() -> Any:
    import triton

    return getattr(triton, "knobs", None)


def _place() -> tuple[dict[str, Any], str, Callable[..., Any]]:
    """Return the dictionary and the key under which Triton looks for its manager, and the one it would use."""
    knobs = _knobs()
    if knobs is not None:
        return knobs.cache.__dict__, "manager_class", cache.FileCacheManager
    return cache.__dict__, "__cache_cls", cache.__dict__["__cache_cls"]


def _by_thread(ident: int, directory: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in for a manager's class, called with a key and with what kind of files is meant."""

    class Local(cache.FileCacheManager):
        def __init__(self, key: str) -> None:
            self.key = key
            self.cache_dir = os.path.join(directory, key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

    def manager(key: str, override: bool = False, dump: bool = False) -> Any:
        if threading.get_ident() == ident and not (override or dump):
            return Local(key)
        return usual(key, override=override, dump=dump)

    return manager
