"""The cooperative way in: a private Unix socket of the job itself, on which an attach may ask for the agent.

On with `mxprobe.listen()`, with `MXPROBE_LISTEN=1` where `mxprobe doctor --install-listener` has put its start-up
hook, and in jobs started by `mxprobe run`. Until somebody attaches it is one thread asleep in accept(2).
One verb is understood, `connect {socket, archive, token}` (frames as in `mxprobe.protocol`), from the same user only.
Standard library only and Python 3.9 syntax. Also loaded by path, without the rest of mxprobe, so it imports none of it.
"""

import contextlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Optional

_MAX_REQUEST_BYTES = 65536
_REQUEST_TIMEOUT_S = 10.0
_MAX_SOCKET_PATH_BYTES = 107
_ALIASES = ("mxprobe.listener", "_mxprobe_listener")

_active: Optional[tuple[socket.socket, str, int]] = None
_hooked = False


def listen() -> Optional[str]:
    """Start listening; returns the socket's path. A second call returns the same one.

    Never raises: it says on stderr why it does not listen, and returns None.
    """
    global _active, _hooked
    for name in _ALIASES:
        other = getattr(sys.modules.get(name), "_active", None)
        if other is not None and other[2] == os.getpid():
            return str(other[1])
    try:
        if how := _forbidden():
            raise PermissionError(f"remote debugging is disabled by {how}")
        path = os.path.join(private_directory(os.environ, reserve_bytes=32), f"{os.getpid()}.listen.sock")
        server = _bind(path)
        _active = (server, path, os.getpid())
        if not _hooked:
            import atexit

            os.register_at_fork(after_in_child=_forget)
            atexit.register(_close)
            _hooked = True
        threading.Thread(target=_serve, args=(server,), name="mxprobe-listener", daemon=True).start()
    except Exception as error:
        print(f"mxprobe: not listening: {error}", file=sys.stderr)
        return None
    return path


def base_directories(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield where a private directory may be, best first. Job and command may see different environments."""
    yield from filter(None, (environ.get("XDG_RUNTIME_DIR"), environ.get("TMPDIR"), "/tmp", f"/run/user/{os.getuid()}"))


def private_directory(environ: Mapping[str, str], *, reserve_bytes: int) -> str:
    """Return `BASE/mxprobe-UID`, created 0700 and verified, with room for `reserve_bytes` more of a socket's path.

    PermissionError where no base takes such a directory, or has one that is a link, another user's or open to others.
    """
    problems = []
    for base in base_directories(environ):
        directory = os.path.join(base, f"mxprobe-{os.getuid()}")
        if not os.path.isabs(base) or len(os.fsencode(directory)) + reserve_bytes > _MAX_SOCKET_PATH_BYTES:
            problems.append(f"{directory}: not absolute, or too long for a socket")
            continue
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
            continue
        if is_private(directory):
            return directory
        problems.append(f"{directory}: a link, another user's, or open to others")
    raise PermissionError("no private directory for the socket; " + "; ".join(problems))


def is_private(path: str) -> bool:
    """Return True for a real directory of this user's that nobody else may enter."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end of a Unix socket, as the kernel recorded them."""
    import struct

    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _forbidden() -> str:
    if os.environ.get("PYTHON_DISABLE_REMOTE_DEBUG"):
        return "PYTHON_DISABLE_REMOTE_DEBUG"
    return "-X disable-remote-debug" if "disable-remote-debug" in getattr(sys, "_xoptions", {}) else ""


def _bind(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of an earlier process of this PID
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    os.chmod(path, 0o600)
    server.listen(4)
    return server


def _serve(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        try:
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                if peer_of(connection)[1] in (0, os.getuid()):
                    _send(connection, _answer(_receive(connection)))
        except Exception:
            continue  # a peer that talks nonsense or leaves is its own problem, never the job's


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("verb") != "connect":
        return {"verb": "failed", "reason": "unknown_verb", "detail": "this socket understands `connect`"}
    try:
        path, archive, token = (str(request[key]) for key in ("socket", "archive", "token"))
        if not is_private(os.path.dirname(archive)):
            raise PermissionError("the archive is not in a private directory of this user's")
        from zipimport import zipimporter

        scope: dict[str, Any] = {"__name__": "mxprobe_loader"}
        exec(zipimporter(archive).get_code("loader"), scope)
        scope["boot"](path, archive, token, os.getpid())
    except Exception as error:
        return {"verb": "failed", "reason": "load_failed", "detail": f"{type(error).__name__}: {error}"}
    return {"verb": "connected"}


def _receive(connection: socket.socket) -> dict[str, Any]:
    import json

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = connection.recv(size - len(data))
            if not chunk:
                raise EOFError("the peer left")
            data += chunk
        return data

    size = int.from_bytes(exactly(4), "big")
    if size > _MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {size} bytes")
    request = json.loads(exactly(size))
    if not isinstance(request, dict):
        raise ValueError("not an object")
    return request  # pyright: ignore[reportUnknownVariableType]


def _send(connection: socket.socket, frame: dict[str, Any]) -> None:
    import json

    data = json.dumps(frame).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _close() -> None:
    global _active
    if _active is not None and _active[2] == os.getpid():
        server, path, _ = _active
        _active = None
        with contextlib.suppress(OSError):
            os.unlink(path)
        server.close()


def _forget() -> None:
    """Close the socket in a forked child: it and its path are the parent's."""
    global _active
    if _active is not None:
        _active[0].close()
        _active = None
