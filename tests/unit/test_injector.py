"""What the injector relies on: addresses, the statement, the loader in every Python it may meet."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mxprobe.attach import loader
from mxprobe.attach.archive import shipped_files, write_archive
from mxprobe.attach.elf import ImageError, exported, find_python, read_maps
from mxprobe.attach.injector import FUNCTIONS
from mxprobe.attach.payload import boot_statement, in_thread
from mxprobe.attach.refusals import REFUSALS
from mxprobe.protocol import recv_frame
from mxprobe_kernels import cpu_backend
from tests.attach_targets import interpreters
from tests.unit.test_listener import STAND_IN


def test_addresses_are_those_of_the_dynamic_linker() -> None:
    image = find_python(os.getpid(), read_maps(os.getpid()), FUNCTIONS)
    for name, address in image.addresses.items():
        assert address == ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        assert image.holds(address)
    assert not image.holds(id(image))


def test_a_library_file_that_was_replaced_is_not_used(tmp_path: Path) -> None:
    maps = read_maps(os.getpid())
    library = find_python(os.getpid(), maps, FUNCTIONS).path
    if library == os.path.realpath(sys.executable):
        pytest.skip("this interpreter is one file, read through /proc/PID/exe")
    replaced = [replace(m, inode=m.inode + 1) if m.path == library else m for m in maps]
    with pytest.raises(ImageError) as error:
        find_python(os.getpid(), replaced, FUNCTIONS)
    assert error.value.reason == "python_image_changed"
    assert error.value.detail == library


def test_other_programs_have_no_interpreter() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(ImageError) as error:
            find_python(child.pid, read_maps(child.pid), FUNCTIONS)
        assert error.value.reason == "not_python"
        assert error.value.detail == "sleep"
    finally:
        child.kill()
        child.wait()


def test_only_64_bit_x86_images() -> None:
    image = bytearray(Path("/proc/self/exe").read_bytes())
    assert exported(b"#!/bin/sh\n", FUNCTIONS) is None
    image[18:20] = (183).to_bytes(2, "little")  # EM_AARCH64
    with pytest.raises(ImageError) as error:
        exported(bytes(image), FUNCTIONS)
    assert error.value.reason == "unsupported_architecture"


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "1/0", "this is not Python"])
def test_the_statement_raises_nothing_and_binds_nothing(source: str) -> None:
    """As the interpreter would run it: in `__main__`, where an exception would end the user's job."""
    program = (
        "import sys, time\n"
        "sys.unraisablehook = lambda *_: None\n"
        "before = set(vars()) | {'before', 'code', 'status'}\n"
        "import ctypes\n"
        "before.add('ctypes')\n"
        f"code = {in_thread(source)!r}.encode()\n"
        "status = ctypes.pythonapi.PyRun_SimpleString(ctypes.c_char_p(code))\n"
        "time.sleep(0.2)\n"
        "print(status, sorted(set(vars()) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "0 []\n", done.stderr


RAISED_INSIDE = """
import builtins, ctypes, signal, sys, time
code = {code!r}.encode()
def handler(number, frame):
    log.append(number)
    raise {raised}
log = []
signal.signal(signal.SIGTERM, handler)
theirs = signal.getsignal(signal.SIGINT)
plain = builtins.__import__
def interrupted(name, *rest):
    if name == "_thread" and not log:
        signal.raise_signal(signal.SIGTERM)
    return plain(name, *rest)
builtins.__import__ = interrupted
try:
    status = ctypes.pythonapi.PyRun_SimpleString(ctypes.c_char_p(code))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        sum(range(100))
    print("lost")
finally:
    error = sys.exc_info()[1]
    names = [frame.f_code.co_name for frame, _ in __import__("traceback").walk_tb(error.__traceback__)]
    print(status, log, names, error.__context__, signal.getsignal(signal.SIGINT) is theirs, flush=True)
"""


@pytest.mark.parametrize("python", interpreters())
@pytest.mark.parametrize(
    ("raised", "code"), [("SystemExit(7)", 7), ("KeyboardInterrupt", -2), ("RuntimeError('mine')", 1)]
)
def test_what_a_signal_handler_raises_in_the_statement_is_raised_in_the_users_code(
    python: str, raised: str, code: int
) -> None:
    """At the worst moment, every time: the handler runs between two bytecodes of the statement."""
    program = RAISED_INSIDE.format(code=in_thread("pass"), raised=raised)
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "0 [15] ['<module>', 'raise_it', 'interrupted', 'handler'] None True\n", done.stderr
    assert done.returncode == code


def test_a_thread_that_cannot_be_started_is_nobodys_exception() -> None:
    program = (
        "import _thread, ctypes, resource, signal, time\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1, 1))\n"
        f"code = {in_thread('pass')!r}.encode()\n"
        "try:\n    _thread.start_new_thread(print, ())\nexcept RuntimeError as error:\n    print(error)\n"
        "print(ctypes.pythonapi.PyRun_SimpleString(ctypes.c_char_p(code)))\n"
        "for _ in range(200): time.sleep(0.001)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "can't start new thread\n0\nTrue\n", done.stderr


def test_the_statement_fits_one_page_even_with_long_paths() -> None:
    path = "/" + "x" * 106
    assert len(boot_statement(path, path, "t" * 32, 4194304).encode()) < 4096


def test_the_archive_is_private_complete_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "agent.zip"
    write_archive(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        listed = archive.read("modules.txt").decode().split()
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    compiled = {f"{name}c" for name in shipped_files()}
    assert names - {"libmxprobe_cpu.so"} == {*shipped_files(), *compiled, "loader.py", "version.txt", "modules.txt"}
    assert ("libmxprobe_cpu.so" in names) == (cpu_backend.library() is not None)
    assert {"mxprobe", "mxprobe.agent.boot", "mxprobe.protocol", "mxprobe_kernels", "mxprobe_kernels.formats"} <= set(
        listed
    )
    assert not [name for name in listed if name.startswith(("mxprobe.cli", "mxprobe.attach", "mxprobe.trace"))]
    with pytest.raises(FileExistsError):
        write_archive(path)


@pytest.mark.parametrize("compares", ["default", "always"])
def test_an_interpreter_of_this_version_compiles_nothing_of_ours(tmp_path: Path, compares: str) -> None:
    path = tmp_path / "agent.zip"
    write_archive(path)
    program = (
        "import builtins, sys, zipimport\n"
        "def refuse(*_, **__): raise AssertionError('compiled')\n"
        "builtins.compile = zipimport.compile = refuse\n"
        f"importer = zipimport.zipimporter({str(path)!r})\n"
        "print(importer.get_code('mxprobe').co_name, importer.get_code('mxprobe/protocol').co_name)"
    )
    command = [sys.executable, "--check-hash-based-pycs", compares, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "<module> <module>\n", done.stderr


LOADED_BY = """
import sys, time, _thread, zipimport
archive, control, pid = sys.argv[1], sys.argv[2], int(sys.argv[3])
import os, threading
before, meta = list(sys.path), list(sys.meta_path)
scope = {"__name__": "mxprobe_loader"}
exec(zipimport.zipimporter(archive).get_code("loader"), scope)
scope["boot"](control, archive, "a secret", pid or os.getpid())
time.sleep(0.3)
print([n for n in sys.modules if n.partition(".")[0] in ("mxprobe", "mxprobe_kernels")],
    [p for p in sys.path_importer_cache if archive in p], sys.path == before, sys.meta_path == meta,
    "socket" in sys.modules)
"""


@pytest.fixture
def control(tmp_path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "control.sock"))
    server.listen()
    server.settimeout(10)
    return server


def load_in(python: str, tmp_path: Path, *, pid: int = 0) -> subprocess.Popen[str]:
    arguments = [str(tmp_path / "agent.zip"), str(tmp_path / "control.sock"), str(pid)]
    environ = {"PATH": os.environ["PATH"]}
    return subprocess.Popen(
        [python, "-W", "error", "-c", LOADED_BY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


@pytest.mark.parametrize("python", interpreters())
def test_the_loader_loads_and_unloads_in_every_python(python: str, tmp_path: Path, control: socket.socket) -> None:
    with control:
        write_archive(tmp_path / "agent.zip", STAND_IN)
        process = load_in(python, tmp_path)
        connection, _ = control.accept()
        with connection:
            hello = recv_frame(connection)
        out, err = process.communicate(timeout=20)
    assert hello is not None
    assert hello["token"] == "a secret"
    assert hello["path"] == [str(tmp_path / "agent.zip" / "mxprobe")]
    assert (out, err) == ("[] [] True True True\n", "")


@pytest.mark.parametrize("late", ["in another process", "after the controller left"])
def test_a_late_payload_does_nothing(late: str, tmp_path: Path, control: socket.socket) -> None:
    with control:
        write_archive(tmp_path / "agent.zip", STAND_IN)
        if late == "after the controller left":
            (tmp_path / "control.sock").unlink()
        process = load_in(sys.executable, tmp_path, pid=1 if late == "in another process" else 0)
        out, err = process.communicate(timeout=20)
        control.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            control.accept()
    assert (out, err) == ("[] [] True True False\n", "")


def test_an_agent_that_does_not_load_is_reported_in_words_and_removed(tmp_path: Path, control: socket.socket) -> None:
    broken = {**STAND_IN, "mxprobe/agent/boot.py": b"raise RuntimeError('a \"quoted\" reason \\u2713')\n"}
    with control:
        write_archive(tmp_path / "agent.zip", broken)
        process = load_in(sys.executable, tmp_path)
        connection, _ = control.accept()
        with connection:
            recv_frame(connection)
            failed = recv_frame(connection)
        out, err = process.communicate(timeout=20)
    assert failed == {"verb": "failed", "reason": "load_failed", "detail": "RuntimeError: a ?quoted? reason ?"}
    assert (out, err) == ("[] [] True True False\n", "")


def test_the_loaders_reasons_have_words() -> None:
    source = Path(loader.__file__).read_text()
    for reason in ("unsupported_python", "already_attached", "version_mismatch", "load_failed"):
        assert json.dumps(reason) in source
        assert reason in REFUSALS
