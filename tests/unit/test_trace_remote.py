"""Traces at URLs, in fsspec's own memory; a real S3 server is in tests/integration/test_trace_s3.py."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from mxprobe.errors import TraceError, UsageError
from mxprobe.trace import TraceWriter, open_trace, remote

pytest.importorskip("fsspec")


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
    ],
)
def test_what_is_a_url(path: Path | str, url: str | None) -> None:
    assert remote.url_of(path) == url


def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url, local = "memory://store/run.mxprobe", tmp_path / "run.mxprobe"
    remote.check_reachable(url)
    with TraceWriter(local, {}, rotate_bytes=1_000, mirror=remote.Mirror(local, url)) as writer:
        for step in range(20):
            writer.append("events", {"step": [step], "kind": ["x"], "detail": ["y" * 500]})
    found = open_trace(url)
    assert found.is_complete
    assert found.url == url
    assert found.place == Path.cwd() / "run.mxprobe"
    pd.testing.assert_frame_equal(found.events(), open_trace(local).events())
    with pytest.raises(UsageError, match="already holds a trace"):
        remote.check_reachable(url)
    with pytest.raises(TraceError, match="nothing is there"):
        open_trace("memory://store/other.mxprobe")


def test_kinds_of_url_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="nosuchthing"):
        open_trace("nosuchthing://a/run.mxprobe")
