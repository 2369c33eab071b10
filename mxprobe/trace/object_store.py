"""A trace in an object store, by any URL that fsspec knows: copied there while it is written, and back to be read.

Acknowledged means on the local disk, always: a store that is slow or gone costs nothing but the copy. Only finished
parts and `run.json` travel; live files do when they have become parts. Needs the extra `s3`, or for other stores their
fsspec filesystem.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from mxprobe.errors import TraceError, UsageError

from . import layout

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)", re.IGNORECASE)
_OF_THIS_MACHINE = ("file", "local")
_TRIES = 3
_WAIT_S = 2.0
_TEMPORARY = re.compile(r"\.(tmp|lock)$")
_STAMPS = "stamps.json"
"""Beside a local copy: what the store said of each file when it was copied."""
_PROBE = ".mxprobe"
"""A file that is written and removed again, to see whether that is allowed."""


def url_of(path: Path | str) -> str | None:
    """Return the URL that a command was given as a path (`pathlib` takes one of its slashes); None if it is local."""
    match = _URL.fullmatch(str(path))
    if match is None or Path(path).exists():
        return None
    root = "/" if match[1].lower() in _OF_THIS_MACHINE else ""
    return f"{match[1]}://{root}{match[2]}".rstrip("/")


def name_of(url: str) -> str:
    """Return the last part of a URL, by which a local directory is called."""
    return url.rpartition("/")[2]


def check_reachable(url: str) -> None:
    """Raise UsageError if a new trace cannot be written there; asked before anybody is attached to."""
    store = _store(url)
    try:
        taken = store.exists(layout.RUN_FILE)
        store.pipe_file(_PROBE, b"")
        store.rm_file(_PROBE)
    except Exception as error:  # every store raises its own
        raise _refused(url, error) from None
    if taken:
        raise UsageError(f"{url} already holds a trace", remedy="name another one with -o, or remove that one")


def fetch(url: str) -> Path:
    """Copy the trace at a URL to the user's cache and return its path; only what changed since the last time travels.

    Raises:
        TraceError: the store cannot be reached, or there is nothing.
        UsageError: fsspec, or what it needs for such URLs, is not installed.
    """
    store = _store(url)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    local = cache / "mxprobe" / hashlib.sha256(url.encode()).hexdigest()[:16] / name_of(url)
    with _alone(local.parent):
        _fetch(store, url, local)
    return local


def _fetch(store: Any, url: str, local: Path) -> None:
    try:
        found = _files_in(store)
    except Exception as error:
        raise _refused(url, error) from None
    if not found:
        raise TraceError(f"no trace at {url}: nothing is there", remedy="give the URL that `mxprobe attach -o` got")
    known: Any = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((local.parent / _STAMPS).read_text(encoding="utf-8"))
    stamps: dict[str, str] = {}
    local.mkdir(parents=True, exist_ok=True)
    for relative, info in sorted(found.items()):
        target = local / relative
        if not target.resolve().is_relative_to(local.resolve()):
            continue  # a name with `..`: nothing of ours
        stamps[relative] = f"{info.get('size')} {info.get('ETag') or info.get('mtime') or info.get('LastModified')}"
        if target.exists() and isinstance(known, dict) and known.get(relative) == stamps[relative]:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            store.get_file(relative, str(temporary))
        except Exception as error:
            temporary.unlink(missing_ok=True)
            raise _refused(url, error) from None
        os.replace(temporary, target)
    for path in local.rglob("*"):
        if path.is_file() and str(path.relative_to(local)) not in stamps:
            path.unlink()
    layout.write_json(local.parent / _STAMPS, stamps)


def upload(directory: Path, url: str) -> None:
    """Copy a finished trace to a URL; what is there already does not travel again.

    Raises:
        TraceError: the store cannot be reached, or refuses.
        UsageError: another trace is there.
    """
    try:
        if _holds_another(directory, url):
            raise UsageError(f"{url} already holds another trace", remedy="name another URL, or remove that one")
        _sync(directory, url, closed=True)
    except UsageError:
        raise
    except Exception as error:
        raise _refused(url, error) from None


def _holds_another(directory: Path, url: str) -> bool:
    store = _store(url)
    if layout.RUN_FILE not in _files_in(store):
        return False
    ours = json.loads((directory / layout.RUN_FILE).read_text(encoding="utf-8"))
    return json.loads(store.cat_file(layout.RUN_FILE)).get("created_ns") != ours.get("created_ns")


class Mirror:
    """Copies a trace that is being written, in a thread of its own. Whatever fails is tried again with the next part.

    Args:
        directory: of the local trace.
        url: where the copy goes.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self.url = url
        self._due = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def poke(self) -> None:
        """Note that there are new parts."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trace-upload", daemon=True)
            self._thread.start()
        self._due.set()

    def finish(self) -> None:
        """Copy the rest. TraceError if it cannot be done: the local trace is complete."""
        self._closed = True
        if self._thread is not None:
            self._due.set()
            self._thread.join()
        for left in reversed(range(_TRIES)):
            try:
                _sync(self._directory, self.url, closed=True)
                return
            except Exception as error:
                if not left:
                    refused = _refused(self.url, error)
                    raise TraceError(
                        f"the trace is complete in {self._directory}, its copy is not: {refused.what}",
                        cause=refused.cause,
                        remedy=f"mxprobe export {self._directory} --upload {self.url}",
                    ) from None
                time.sleep(_WAIT_S)

    def _work(self) -> None:
        while not self._closed:
            self._due.wait()
            self._due.clear()
            if not self._closed:
                with contextlib.suppress(Exception):  # with the next part, or at the end, again
                    _sync(self._directory, self.url, closed=False)


def _sync(directory: Path, url: str, *, closed: bool) -> None:
    """Copy parts first, then `run.json`; then remove parts that others hold as well."""
    store = _store(url)
    there = _files_in(store)
    ours: dict[str, int] = {}
    for path in directory.rglob("*"):
        relative = path.relative_to(directory)
        is_live = relative.parts[0] == layout.LIVE_DIRECTORY and not closed
        if not is_live and not relative.name.startswith(".") and not _TEMPORARY.search(relative.name):
            with contextlib.suppress(FileNotFoundError):  # put together with others meanwhile
                if path.is_file():
                    ours[str(relative)] = path.stat().st_size
    held: list[str] = []
    for relative, size in sorted(ours.items()):
        if relative != layout.RUN_FILE:
            with contextlib.suppress(FileNotFoundError):
                if relative not in there or there[relative].get("size") != size:
                    store.put_file(str(directory / relative), relative)
                held.append(relative)
    run = json.loads((directory / layout.RUN_FILE).read_text(encoding="utf-8"))
    if not closed:
        run["copied_while_written"] = True
    store.pipe_file(layout.RUN_FILE, json.dumps(run, indent=1).encode())
    for relative in there:
        if relative not in ours and layout.is_covered(relative, held):
            store.rm_file(relative)


def _store(url: str) -> Any:
    """Open the fsspec filesystem below a URL; paths are relative to it."""
    try:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem
    except ImportError:
        raise _not_installed(url) from None
    options = {"skip_instance_cache": True} if url.startswith("s3") else {}
    if url.partition(":")[0].lower() in _OF_THIS_MACHINE:
        options = {"auto_mkdir": True}
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
        return DirFileSystem(root, fs)
    except ImportError:
        raise _not_installed(url) from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}", cause="no such kind of URL", remedy="s3://BUCKET/NAME.mxprobe") from None


def _files_in(store: Any) -> dict[str, dict[str, Any]]:
    """Return relative path -> what the store says of the file, asked anew."""
    store.invalidate_cache()
    return store.find("", detail=True)


def _not_installed(url: str) -> UsageError:
    scheme = url.partition(":")[0]
    return UsageError(
        f"{url} cannot be opened: a package is missing",
        cause=f"fsspec, or its filesystem for {scheme}://, is not installed",
        remedy="pip install 'mxprobe[s3]'"
        if scheme.startswith("s3")
        else f"pip install fsspec and what {scheme}:// needs",
    )


def _refused(url: str, error: Exception) -> TraceError:
    """Put in words what a store raised: the kinds are told by name, as each store has classes of its own."""
    kind, text = type(error).__name__, str(error) or repr(error)
    if isinstance(error, (TraceError, UsageError)):
        return TraceError(error.what, cause=error.cause, remedy=error.remedy)
    if "Credential" in kind or "Token" in kind:
        cause, remedy = "no credentials were found", "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    elif isinstance(error, PermissionError):
        cause, remedy = "the credentials do not allow it", "ask for read and write access to the bucket"
    elif isinstance(error, FileNotFoundError):
        cause, remedy = "the bucket or the path does not exist", "create the bucket, or correct the URL"
    else:
        cause, remedy = "the connection was lost, or the endpoint is wrong", "try again; check AWS_ENDPOINT_URL"
    return TraceError(f"{url}: {kind}: {text}", cause=cause, remedy=remedy)


@contextlib.contextmanager
def _alone(cache: Path) -> Generator[None, None, None]:
    """Let commands on one URL take turns with its copy."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".fetch.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
