"""The cooperative socket: private, one verb, gone with its process."""

from __future__ import annotations

import ast
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mxprobe import listener
from mxprobe.attach.archive import write_archive
from mxprobe.listener import is_private, private_directory
from mxprobe.protocol import recv_frame, send_frame

LISTENING = """
import sys, os
import mxprobe
path = mxprobe.listen()
assert mxprobe.listen() == path
print(path, flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Job:
    """A process that listens, and evaluates what it is asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.socket = self._line()

    def eval(self, expression: str) -> str:
        assert self.process.stdin is not None
        print(expression, file=self.process.stdin, flush=True)
        return self._line()

    def request(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(self.socket)
            send_frame(connection, frame)
            return recv_frame(connection)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def job(environ: Mapping[str, str]) -> Generator[Job]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        yield Job(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short name: a socket's has 107 characters at most."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def base(runtime: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(runtime)}


def test_directory_and_socket_are_private(base: dict[str, str], runtime: Path) -> None:
    with job(base) as listening:
        assert listening.socket == str(runtime / f"mxprobe-{os.getuid()}" / f"{listening.process.pid}.listen.sock")
        assert stat.S_IMODE(os.stat(os.path.dirname(listening.socket)).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(listening.socket).st_mode) == 0o600
        assert listening.eval("'torch' in sys.modules or 'numpy' in sys.modules") == "False"


def test_one_verb_only(base: dict[str, str]) -> None:
    with job(base) as listening:
        answer = listening.request({"verb": "status"})
        assert answer is not None
        assert (answer["verb"], answer["reason"]) == ("failed", "unknown_verb")
        answer = listening.request({"verb": "connect", "socket": "/x"})
        assert answer is not None
        assert answer["reason"] == "load_failed"


def test_nonsense_and_oversized_requests_are_dropped_and_it_listens_on(base: dict[str, str]) -> None:
    with job(base) as listening:
        for data in (b"\xff\xff\xff\xff" + b"x" * 100, b"\x00\x00\x00\x04nope", b"\x00\x00\x00\x02[]", b"\x00"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(listening.socket)
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):  # it may close with our bytes unread
                    assert connection.recv(100) == b""
        assert listening.request({"verb": "ping"}) is not None


def test_code_is_taken_from_private_directories_only(base: dict[str, str], tmp_path: Path) -> None:
    open_to_others = tmp_path / "open"
    open_to_others.mkdir(mode=0o755)
    write_archive(open_to_others / "agent.zip", {})
    with job(base) as listening:
        request = {"verb": "connect", "socket": "/x", "archive": str(open_to_others / "agent.zip"), "token": "t"}
        answer = listening.request(request)
    assert answer is not None
    assert "private directory" in answer["detail"]


def test_the_socket_goes_with_the_process(base: dict[str, str]) -> None:
    with job(base) as listening:
        assert os.path.exists(listening.socket)
        listening.process.communicate("")
        assert not os.path.exists(listening.socket)


def test_a_forked_child_is_not_the_one_who_listens(base: dict[str, str]) -> None:
    with job(base) as listening:
        fork = "(lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit({code}))(os.fork())"
        forgotten = "int(sys.modules['mxprobe.listener']._active is not None)"
        assert listening.eval(fork.format(code=forgotten)) == "0"
        assert os.path.exists(listening.socket)
        assert listening.request({"verb": "ping"}) is not None


@pytest.mark.parametrize("option", [{"PYTHON_DISABLE_REMOTE_DEBUG": "1"}, {"-X": "disable-remote-debug"}])
def test_it_does_not_listen_where_remote_debugging_is_disabled(base: dict[str, str], option: dict[str, str]) -> None:
    flags = ["-X", option["-X"]] if "-X" in option else []
    environ = {**os.environ, **base, **({} if flags else option)}
    done = subprocess.run(
        [sys.executable, *flags, "-c", "import mxprobe; print(mxprobe.listen())"],
        capture_output=True,
        text=True,
        env=environ,
        check=True,
    )
    assert done.stdout == "None\n"
    assert "not listening: remote debugging is disabled" in done.stderr


def test_unsafe_directories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"mxprobe-{os.getuid()}"
    shared, linked, fine = tmp_path / "shared", tmp_path / "linked", tmp_path / "fine"
    for base in (shared, linked, fine):
        base.mkdir()
    (shared / name).mkdir()
    (shared / name).chmod(0o750)
    (linked / name).symlink_to(fine, target_is_directory=True)
    assert not is_private(str(shared / name))
    assert not is_private(str(linked / name))

    def only(environ: Mapping[str, str]) -> list[str]:
        return environ["BASES"].split(":")

    monkeypatch.setattr(listener, "base_directories", only)
    with pytest.raises(PermissionError, match="a link, another user's, or open to others"):
        private_directory({"BASES": f"{shared}:{linked}:relative"}, reserve_bytes=10)
    found = private_directory({"BASES": f"{shared}:{linked}:{fine}"}, reserve_bytes=10)
    assert found == str(fine / name)
    with pytest.raises(PermissionError, match="too long for a socket"):
        private_directory({"BASES": str(fine)}, reserve_bytes=100)


def test_standard_library_only_and_python_3_9_syntax() -> None:
    source = Path(listener.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


# What the shipped agent is to the loader, with nothing in it: says hello, and what it was loaded from.
STAND_IN = {
    "mxprobe/__init__.py": b"__version__ = 'stand-in'\n",
    "mxprobe/agent/__init__.py": b"",
    "mxprobe_kernels/__init__.py": b"",
    "mxprobe/agent/boot.py": b"""
import json, socket, sys
import mxprobe, mxprobe_kernels
def start(path, token):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    found = {"verb": "hello", "token": token, "file": __file__, "path": list(mxprobe.__path__)}
    data = json.dumps(found).encode()
    sock.sendall(len(data).to_bytes(4, "big") + data)
    sys.modules["mxprobe"].__dict__["_unload"]()
    sock.close()
""",
}


@pytest.mark.parametrize("mxprobe_is_installed", [True, False])
def test_connect_loads_the_agent_and_it_leaves_nothing(runtime: Path, mxprobe_is_installed: bool) -> None:
    """In a job that imported mxprobe itself, and in one that only has the listener's file (`mxprobe run`)."""
    startup = Path(listener.__file__).parent / "attach" / "startup"
    code = (
        "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
        + ("import mxprobe; mxprobe.__version__ = mxprobe.__version__\n" if mxprobe_is_installed else "")
        + "print('up', flush=True); sys.stdin.readline()\n"
        + "left = [n for n in sys.modules if n.partition('.')[0] in ('mxprobe', 'mxprobe_kernels')]\n"
        + "print(len(left), [p for p in sys.path_importer_cache if 'agent.zip' in p], sys.meta_path == meta)\n"
    ).replace("print('up'", "meta = list(sys.meta_path); print('up'")
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "MXPROBE_LISTEN": "1", "PYTHONPATH": str(startup)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    private = runtime / f"mxprobe-{os.getuid()}"
    archive = private / "agent.zip"
    write_archive(archive, STAND_IN)
    control = private / "control.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as connection:
        server.bind(str(control))
        server.listen()
        server.settimeout(10)
        connection.settimeout(10)
        connection.connect(str(private / f"{process.pid}.listen.sock"))
        send_frame(
            connection, {"verb": "connect", "socket": str(control), "archive": str(archive), "token": "a secret"}
        )
        assert recv_frame(connection) == {"verb": "connected"}
        agent, _ = server.accept()
        with agent:
            agent.settimeout(10)
            hello = recv_frame(agent)
            assert hello is not None
            assert hello["token"] == "a secret"
            if mxprobe_is_installed:  # the same version is there already: it is used
                assert hello["verb"] == "hello"
                assert hello["python"] == sys.version.split()[0]
            else:
                assert hello["file"].startswith(f"{archive}/mxprobe/agent/boot.py")
                assert hello["path"] == [f"{archive}/mxprobe"]
                assert agent.recv(1) == b""
    out, _ = process.communicate("\n")
    count, rest = out.split(" ", 1)
    assert rest == "[] True\n"
    assert (int(count) > 0) == mxprobe_is_installed
