"""What SECURITY.md says, held against the code: nothing is unpickled or evaluated, nobody else gets an answer, nothing
is written through a link or outside the trace, and the trace has no column for what it must not hold."""

from __future__ import annotations

import ast
import os
import queue
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from mxprobe import listener
from mxprobe.attach.server import ControlServer, Event
from mxprobe.attach.trace_recorder import RunTrace, TraceRecorder
from mxprobe.errors import TraceError
from mxprobe.protocol import encode
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, layout, open_trace
from mxprobe_reports import versions_card
from tests.attach_targets import interpreters

ROOT = Path(__file__).parents[2]
SOURCES = [path for part in ("mxprobe", "kernels", "reports") for path in sorted((ROOT / part).rglob("*.py"))]
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
SUSPICIOUS = re.compile(
    "|".join(UNPICKLING) + r"|\b(eval|exec|compile|load|system)\(|__import__|popen|mktemp|read_pickle|shell"
)
# Our own code, read from our own archive in a directory that only its owner can enter.
EXECUTED = {("mxprobe/listener.py", "exec"), ("mxprobe/attach/loader.py", "exec")}
# What we compiled of it is written there too, for the interpreter's own import to read; nothing of ours unmarshals.
WRITTEN = {("mxprobe/attach/archive.py", "marshal")}


def option(call: ast.Call, name: str) -> str:
    return next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name), "")


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    found: list[str] = []
    for path in SOURCES:
        text, place = path.read_text(), path.relative_to(ROOT).as_posix()
        if SUSPICIOUS.search(text) is None:
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.partition(".")[0] for name in names} & UNPICKLING
            found += [f"{place} imports {name}" for name in packages if (place, name) not in WRITTEN]
            if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))):
                continue
            name = ast.unparse(node.func)
            bad = (
                (name in ("eval", "exec", "compile", "__import__") and (place, name) not in EXECUTED)
                or (name == "torch.load" and option(node, "weights_only") != "True")
                or (name in ("np.load", "numpy.load") and option(node, "allow_pickle") != "False")
                or name
                in (
                    "marshal.load",
                    "marshal.loads",
                    "yaml.load",
                    "os.system",
                    "os.popen",
                    "tempfile.mktemp",
                    "pd.read_pickle",
                )
                or option(node, "shell") == "True"
            )
            found += [f"{place}:{node.lineno} calls {name}"] if bad else []
    assert found == []
    assert len(SOURCES) > 200


@pytest.fixture
def open_directory() -> Generator[Path]:
    """Where everybody may go: the kernel's own checks are out of the way."""
    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as name:
        os.chmod(name, 0o777)
        yield Path(name)


STRANGER = """
import socket, struct, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.settimeout(20)
peer.connect(sys.argv[1])
body = sys.argv[2].encode()
try:
    peer.sendall(struct.pack(">I", len(body)) + body)
    answer = peer.recv(100)
except (BrokenPipeError, ConnectionResetError):
    answer = b""
print("answered" if answer else "hung up")
"""


def as_nobody(path: Path, request: str) -> str:
    python = next((p for p in interpreters() if p.startswith("/usr/bin")), None)
    if os.geteuid() != 0 or shutil.which("setpriv") is None or python is None:
        pytest.skip("needs root, setpriv and an interpreter that another user may run")
    prefix = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command = [*prefix, python, "-c", STRANGER, str(path), request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_user_gets_no_answer_from_the_control_socket(open_directory: Path) -> None:
    """Even where a mistake has left the way to the socket open: detaching and reading the status are refused too."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    path = open_directory / "s"
    server = ControlServer(path, token="t", pid=os.getpid(), events=events, on_batch=lambda frame: None)
    try:
        os.chmod(path, 0o666)
        for verb in ("status", "detach"):
            assert as_nobody(path, f'{{"verb": "{verb}", "token": "t", "protocol": 1}}') == "hung up"
        assert events.empty()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as owner:
            owner.connect(str(path))
            owner.sendall(encode({"verb": "status"}))
            assert events.get(timeout=20) is not None
    finally:
        server.close()


def test_another_user_gets_no_answer_from_the_listener(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_directory))
    path = listener.listen()
    assert path is not None
    try:
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        if os.geteuid() == 0:
            with pytest.raises(AssertionError, match="Permission denied"):
                as_nobody(Path(path), "{}")
        os.chmod(Path(path).parent, 0o777)
        os.chmod(path, 0o666)
        assert as_nobody(Path(path), '{"verb": "connect"}') == "hung up"
    finally:
        listener._close()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("table", ["../evil", "/tmp/evil", "tensors/../../evil", "", "tensors\x00"])
def test_no_name_of_a_table_becomes_a_path(table: str, tmp_path: Path) -> None:
    trace = RunTrace(tmp_path / "here" / "run.mxprobe", [1], {})
    recorder = TraceRecorder(trace, 1)
    recorder.open()
    with pytest.raises(TraceError):
        recorder.write({"table": table, "columns": {"step": [1]}})
    recorder.end("done")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run.mxprobe"]


@pytest.mark.parametrize("rank", ["../1", "-1", "1/../../2", "99999999999", "1.5", "٣x"])
def test_no_rank_of_an_agent_becomes_a_path(rank: str) -> None:
    from mxprobe.attach.agent_link import AgentLink
    from mxprobe.attach.server import Peer

    link = AgentLink()
    with socket.socket(socket.AF_UNIX) as end:
        link.arrive(Peer(end), {"verb": "hello", "rank": rank})
        assert link.rank == 0


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """In a directory that others may write to, somebody may have put links where our files are going to be."""
    directory, victim = tmp_path / "run.mxprobe", tmp_path / "victim"
    directory.mkdir()
    victim.write_text("precious")
    live, part = layout.live_path(directory, "events", 0), layout.part_path(directory, "events", 0, 0)
    temporary = part.with_name(f".{part.name}.tmp")
    part.parent.mkdir(parents=True)
    for path in (directory / ".run.json.tmp", temporary):
        path.symlink_to(victim)
    with TraceWriter(directory, {}) as writer:
        writer.append("events", {"step": [1], "kind": ["x"]})
    assert len(open_trace(directory).events()) == 1
    assert victim.read_text() == "precious"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / layout.LOCK_FILE).symlink_to(tmp_path / "made")
    with pytest.raises(TraceError, match="cannot write a trace"):
        TraceWriter(tmp_path / "second", {})
    assert not (tmp_path / "made").exists()
    assert not live.exists()


# Columns that may hold text, and what writes it. No text of the run's data may get into any of them.
TEXT = {
    "data": "events: JSON of numbers, slugs, names of modules and of files",
    "detail": "events: our own words, an exception's message, file names, a recipe",
    "reason": "modules: our own words",
}
NAMES = {
    *(
        "arm",
        "comparison",
        "component",
        "correction",
        "estimator",
        "form",
        "format",
        "gemm",
        "kind",
        "layout",
        "measure",
    ),
    *("method", "metric", "phase", "placement", "recipe_w", "recipe_x", "role", "rule", "state", "status", "stratum"),
    *("class_name", "dtype", "framework", "layer", "module", "name", "raw_key", "source", "subject"),
}
# Lists: of fixed length, or of numbers of features, of hashes and of a shape.
LISTS = {"delta_hist", "code_hist", "features", "hashes", "shape"}


def test_no_column_is_made_for_text_or_tensors_of_the_run() -> None:
    """A column that is added has to be thought about here, and told of in the report and SECURITY.md."""
    by_kind: dict[str, set[str]] = {}
    for columns in TABLES.values():
        for name, kind in columns:
            by_kind.setdefault("list" if kind.startswith("list") else kind, set()).add(name)
    assert by_kind.pop("string") == set(TEXT)
    assert by_kind.pop("dict") == NAMES
    assert by_kind.pop("list") == LISTS
    assert set(by_kind) == {"int32", "int64", "float64", "bool"}
    words = " ".join((ROOT / "SECURITY.md").read_text().split())
    for what in ("hashes of quantized codes", "the command lines of the job and of the attach"):
        assert what in words
    assert "No prompt, completion, token, weight, activation or gradient" in versions_card.HOLDS
