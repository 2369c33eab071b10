"""A trace in an object store: a real S3-compatible server (moto's) in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from mxprobe.errors import TraceError, UsageError
from mxprobe.trace import Retention, TraceWriter, object_store, open_trace
from tests import trace_files

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = [
    pytest.mark.slow,
    # botocore parses times with a function that Python 3.12 deprecates; s3fs closes its session when it is collected.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def s3_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            yield process
        finally:
            process.kill()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Of no server yet; the environment of this process and its children points there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{number}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "_WAIT_S", 0.1)
    return number


def make_bucket(name: str) -> None:
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)


def mxprobe(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mxprobe", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def assert_same(one: Path | str, other: Path | str) -> None:
    for table in ("tensors", "whatif", "outputs", "signals", "events", "overhead"):
        pd.testing.assert_frame_equal(open_trace(one).table(table), open_trace(other).table(table))


def test_a_trace_goes_there_while_it_is_written_and_is_read_from_there(port: int, tmp_path: Path) -> None:
    url, local = "s3://traces/team/run.mxprobe", tmp_path / "run.mxprobe"
    tables = trace_files.frames(n_layers=1, n_steps=60)
    with s3_server(port):
        make_bucket("traces")
        object_store.check_reachable(url)
        mirror = object_store.Mirror(local, url)
        kept = Retention(max_bytes=1_500_000)
        with TraceWriter(local, {}, rotate_bytes=20_000, retention=kept, mirror=mirror) as writer:
            trace_files.append(writer, {"modules": tables.pop("modules")})
            for first in range(1, 61, 10):
                part = {name: rows[rows["step"].between(first, first + 9)] for name, rows in tables.items()}
                trace_files.append(writer, part)
            writer.settle()
            deadline = time.monotonic() + 120
            while not object_store._store(url).exists("run.json"):  # pyright: ignore[reportPrivateUsage]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert any("still being written" in problem for problem in open_trace(url).problems)
        assert open_trace(url).is_complete
        assert_same(url, local)
        with pytest.raises(UsageError, match="already holds a trace"):
            object_store.check_reachable(url)
        written = mxprobe("report", url, "--json", cwd=tmp_path)
        assert written.returncode == 0, written.stderr
        assert (tmp_path / "run.html").exists()
        assert mxprobe("recommend", url, cwd=tmp_path).returncode == 0
        missing = mxprobe("recommend", "s3://traces/none.mxprobe", cwd=tmp_path)
        assert missing.returncode == 3
        assert "nothing is there" in missing.stderr


def test_only_what_changed_travels_again(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = trace_files.write_trace(tmp_path / "run.mxprobe", trace_files.frames(n_layers=1, n_steps=20))
    with s3_server(port):
        make_bucket("traces")
        object_store.upload(directory, "s3://traces/run.mxprobe")
        local = object_store.fetch("s3://traces/run.mxprobe")
        before = {path: path.stat().st_mtime_ns for path in local.rglob("*.parquet")}
        assert object_store.fetch("s3://traces/run.mxprobe") == local
        assert {path: path.stat().st_mtime_ns for path in local.rglob("*.parquet")} == before
        assert before


def test_a_store_that_is_lost_costs_only_the_copy(port: int, tmp_path: Path) -> None:
    """It goes while the trace is written; the trace is whole, and one command copies it later."""
    url, local = "s3://traces/run.mxprobe", tmp_path / "run.mxprobe"
    with s3_server(port):
        make_bucket("traces")
        writer = TraceWriter(local, {}, rotate_bytes=2_000, mirror=object_store.Mirror(local, url))
        writer.append("events", {"step": [1], "kind": ["x"], "detail": ["y" * 3_000]})
        writer.settle()
    for step in range(2, 20):
        writer.append("events", {"step": [step], "kind": ["x"], "detail": ["y" * 3_000]})
    with pytest.raises(TraceError, match="is complete") as lost:
        writer.close()
    assert "--upload" in str(lost.value)
    assert open_trace(local).is_complete
    assert open_trace(local).events()["step"].tolist() == list(range(1, 20))
    with s3_server(port):
        make_bucket("traces")
        done = mxprobe("export", str(local), "--upload", url, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        pd.testing.assert_frame_equal(open_trace(url).events(), open_trace(local).events())


def test_what_is_wrong_is_said_before_anything_is_attached(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(port):
        with pytest.raises(TraceError, match="bucket") as missing:
            object_store.check_reachable("s3://no-such-bucket/run.mxprobe")
        assert "does not exist" in missing.value.cause
        with monkeypatch.context() as without:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                without.delenv(name)
            without.setenv("HOME", str(tmp_path))
            with pytest.raises(TraceError) as nobody:
                object_store.check_reachable("s3://no-such-bucket/run.mxprobe")
        assert "credentials" in nobody.value.cause
    attach = mxprobe("attach", str(os.getpid()), "-o", "s3://traces/run.mxprobe", cwd=tmp_path)
    assert attach.returncode == 3
    assert "connection" in attach.stderr
    assert not (tmp_path / "run.mxprobe").exists()
