"""Runs inside the attached process: loads the agent from its archive, starts it, takes every module out again.

`boot` is called in a thread of its own, by the injected statement or by the listener. `mxprobe` and
`mxprobe_kernels` come from the archive straight into `sys.modules`: neither `sys.path` nor `sys.meta_path`
is touched, and submodules resolve through the packages' own `__path__`. A process that the agent cannot serve
is told apart before anything is loaded; what needs torch is loaded by the agent, once torch is there.
Standard library and Python 3.9 syntax only; not imported by the controller, but shipped as `loader` in the archive.
"""

import os
import sys
from typing import Any

_PACKAGES = ("mxprobe_kernels", "mxprobe")
_ENTRY = "mxprobe.agent.boot"


def boot(socket_path: str, archive: str, token: str, pid: int) -> None:
    """Load and start the agent; anything that goes wrong is told to the controller and leaves nothing behind."""
    # Pending calls are copied by fork: a child must not answer for its parent. A removed socket: too late.
    if os.getpid() != pid or not os.path.exists(socket_path):
        return
    try:
        reason, detail = _unfit(archive)
        if not reason:
            _start(socket_path, archive, token)
    except BaseException as error:
        reason, detail = "load_failed", f"{type(error).__name__}: {error}"
        _unload(archive)
    if reason:
        _refuse(socket_path, token, reason, detail)


def _unfit(archive: str) -> "tuple[str, str]":
    """Return why this interpreter cannot be served: a refusal's slug and detail, or two empty strings."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.hexversion < 0x03090000:
        return "unsupported_python", f"Python {version}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "unsupported_python", f"free-threaded Python {version}"
    present = sys.modules.get("mxprobe")
    if present is not None and not _gone(present):
        return "already_attached", ""
    present = sys.modules.get("mxprobe")
    if present is not None:
        shipped = _read(archive, "version.txt")
        found = str(getattr(present, "__version__", "unknown"))
        if found != shipped:
            return "version_mismatch", f"{found} there, {shipped} here"
    return "", ""


def _gone(module: Any) -> bool:
    """Wait a moment for an agent that has said goodbye and is unloading; False if one stays."""
    import time

    for _ in range(100):
        if "_unload" not in module.__dict__ or sys.modules.get("mxprobe") is not module:
            return True
        time.sleep(0.02)
    return False


def _start(socket_path: str, archive: str, token: str) -> None:
    import importlib
    import threading

    if "mxprobe" not in sys.modules:
        for name in _PACKAGES:
            _load_package(archive, name)
    entry = importlib.import_module(_ENTRY)
    mxprobe = sys.modules["mxprobe"]
    mxprobe.__dict__["_unload"] = lambda: _unload(archive)
    if str(mxprobe.__file__).startswith(archive + os.sep):  # else it is installed there, and loads what it needs
        mxprobe.__dict__["_load_all"] = lambda: _load_all(archive)

    def run() -> None:
        try:
            entry.start(socket_path, token)
        except BaseException as error:
            _unload(archive)
            _refuse(socket_path, token, "load_failed", f"{type(error).__name__}: {error}")

    threading.Thread(target=run, name="mxprobe-agent", daemon=True).start()


def _load_all(archive: str) -> None:
    """Import every module of ours at once, so that nothing is read from disk in the middle of a training step."""
    import importlib

    for name in _read(archive, "modules.txt").split():
        importlib.import_module(name)


def _load_package(archive: str, name: str) -> None:
    """Execute the package's `__init__` as `sys.modules[name]`, its `__path__` inside the archive."""
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from zipimport import zipimporter

    importer: Any = zipimporter(archive)
    location = os.path.join(archive, name)
    spec = ModuleSpec(name, importer, origin=os.path.join(location, "__init__.py"), is_package=True)
    spec.submodule_search_locations = [location]
    module = ModuleType(name)
    module.__spec__, module.__loader__, module.__package__ = spec, importer, name
    module.__file__, module.__path__ = spec.origin, [location]
    sys.modules[name] = module
    exec(importer.get_code(name), module.__dict__)


def _unload(archive: str) -> None:
    """Take out what came from the archive, and what the import system remembers of it."""
    import zipimport

    inside = archive + os.sep
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            if str(getattr(module, "__file__", "")).startswith(inside):
                sys.modules.pop(name, None)
            else:
                module.__dict__.pop("_unload", None)
                module.__dict__.pop("_load_all", None)
    for cache in (sys.path_importer_cache, getattr(zipimport, "_zip_directory_cache", {})):
        for key in [key for key in cache if key == archive or key.startswith(inside)]:
            cache.pop(key, None)


def _read(archive: str, member: str) -> str:
    from zipimport import zipimporter

    return zipimporter(archive).get_data(os.path.join(archive, member)).decode()


def _refuse(socket_path: str, token: str, reason: str, detail: str) -> None:
    """Tell the controller why not, importing no Python module that the process may not have."""
    import _socket

    version = ".".join(map(str, sys.version_info[:3]))
    hello = f'"verb":"hello","token":"{token}","pid":{os.getpid()},"protocol":1,"python":"{version}","torch":null'
    failed = f'"verb":"failed","reason":"{reason}","detail":"{_plain(detail)}"'
    try:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            sock.settimeout(10)
            sock.connect(socket_path)
            for members in (hello, failed):
                data = ("{" + members + "}").encode()
                sock.sendall(len(data).to_bytes(4, "big") + data)
        finally:
            sock.close()
    except OSError:
        pass  # the controller is gone: nobody is left to be told


def _plain(text: str) -> str:
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in text[:500])
