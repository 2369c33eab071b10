"""The record of pages to unmap, and when it goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mxprobe.attach.page_record import PageRecord
from mxprobe.attach.process import look_up
from mxprobe.attach.rundir import RunDirectory, clean_stale


def test_kept_until_all_are_unmapped(tmp_path: Path) -> None:
    record = PageRecord(tmp_path / "record")
    assert record.pages() == []
    record.add((4096, 8192))
    record.add((65536, 4096))
    assert PageRecord(record.path).pages() == [(4096, 8192), (65536, 4096)]
    record.discard([(4096, 8192)])
    assert record.pages() == [(65536, 4096)]
    record.discard([(65536, 4096)])
    assert not record.path.exists()


@pytest.mark.parametrize("text", ["", "nonsense", "[1, 2]", "{}", '[["a", 1]]'])
def test_a_torn_record_is_an_empty_one(text: str, tmp_path: Path) -> None:
    record = PageRecord(tmp_path / "record")
    record.path.write_text(text)
    assert record.pages() == []


def test_it_outlives_the_attachment_and_goes_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    me = look_up(os.getpid())
    directory = RunDirectory.create(me)
    record = directory.page_record
    record.add((4096, 4096))
    directory.close()
    clean_stale()
    assert record.pages() == [(4096, 4096)]
    earlier = record.path.with_name(f"{me.pid}.{me.start_ticks - 1}.pages")
    dead = record.path.with_name("4194304.1.pages")
    for path in (earlier, dead):
        path.write_text("[]")
    assert {path for path in clean_stale() if path.parent == record.path.parent} == {earlier, dead}
    assert record.path.exists()
