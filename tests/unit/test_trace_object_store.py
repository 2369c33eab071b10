"""Traces at URLs, in fsspec's own memory; a real S3 server is in tests/integration/test_trace_s3.py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from mxprobe.errors import TraceError, UsageError
from mxprobe.trace import TraceWriter, object_store, open_trace

fsspec = pytest.importorskip("fsspec")


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/run.mxprobe", "s3://bucket/run.mxprobe"),
        (Path("s3://bucket/run.mxprobe"), "s3://bucket/run.mxprobe"),
        (Path("gs:/a/b/"), "gs://a/b"),
        ("run.mxprobe", None),
        ("/a/b.mxprobe", None),
        ("./a:/b", None),
        ("c:/b", None),
        ("file:///a/b.mxprobe", "file:///a/b.mxprobe"),
        (Path("file:///a/b.mxprobe"), "file:///a/b.mxprobe"),
    ],
)
def test_what_is_a_url(path: Path | str, url: str | None) -> None:
    assert object_store.url_of(path) == url


def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url, local = "memory://store/run.mxprobe", tmp_path / "run.mxprobe"
    object_store.check_reachable(url)
    with TraceWriter(local, {}, rotate_bytes=1_000, mirror=object_store.Mirror(local, url)) as writer:
        for step in range(20):
            writer.append("events", {"step": [step], "kind": ["x"], "detail": ["y" * 500]})
    found = open_trace(url)
    assert found.is_complete
    assert found.url == url
    assert found.place == Path.cwd() / "run.mxprobe"
    pd.testing.assert_frame_equal(found.events(), open_trace(local).events())
    with pytest.raises(UsageError, match="already holds a trace"):
        object_store.check_reachable(url)
    with pytest.raises(TraceError, match="nothing is there"):
        open_trace("memory://store/other.mxprobe")


def test_kinds_of_url_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="nosuchthing"):
        open_trace("nosuchthing://a/run.mxprobe")


def write(directory: Path, n_steps: int = 3) -> Path:
    with TraceWriter(directory, {}) as writer:
        for step in range(n_steps):
            writer.append("events", {"step": [step], "kind": ["x"], "detail": ["y"]})
    return directory


def test_two_traces_are_not_mixed_at_one_url(tmp_path: Path) -> None:
    url = "memory://store/mixed.mxprobe"
    first, second = write(tmp_path / "a.mxprobe"), write(tmp_path / "b.mxprobe")
    object_store.upload(first, url)
    object_store.upload(first, url)
    with pytest.raises(UsageError, match="already holds another trace"):
        object_store.upload(second, url)


def test_a_part_goes_from_the_store_when_what_replaced_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, local = "memory://store/merged.mxprobe", write(tmp_path / "run.mxprobe")
    object_store.upload(local, url)
    store = fsspec.filesystem("memory")
    folder = local / "events" / "rank=0"
    part = folder / "part-00000.parquet"
    listed = Path.rglob

    def merged_meanwhile(path: Path, pattern: str) -> list[Path]:
        found = [each for each in listed(path, pattern) if each != part]
        part.rename(folder / "part-00000-00001.parquet")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rglob", merged_meanwhile)
        object_store.upload(local, url)
    held = [path.rpartition("/")[2] for path in store.find("/store/merged.mxprobe/events")]
    assert held == ["part-00000.parquet"]
    object_store.upload(local, url)
    held = [path.rpartition("/")[2] for path in store.find("/store/merged.mxprobe/events")]
    assert held == ["part-00000-00001.parquet"]


def test_commands_on_one_url_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = "memory://store/shared.mxprobe"
    object_store.upload(write(tmp_path / "run.mxprobe"), url)
    store = type(fsspec.filesystem("memory"))
    get_file = store.get_file

    def get_slowly(*args: object) -> None:
        get_file(*args)
        time.sleep(0.02)

    monkeypatch.setattr(store, "get_file", get_slowly)
    with ThreadPoolExecutor(4) as pool:
        lengths = list(pool.map(lambda _: len(open_trace(url).events()), range(8)))
    assert lengths == [3] * 8


def test_a_file_url_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = tmp_path / "there.mxprobe"
    object_store.upload(write(tmp_path / "run.mxprobe"), f"file://{there}")
    assert (there / "run.json").exists()
    assert len(open_trace(f"file://{there}").events()) == 3
