"""A damaged trace is read as far as it goes, or refused with words: never another exception, never forged rows.

`MXPROBE_FUZZ=N` makes N damaged traces instead of the default.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mxprobe.errors import TraceError
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, compact, open_trace
from mxprobe.trace.layout import cut_files, live_path, part_files
from tests import synthetic

N_EXAMPLES = int(os.environ.get("MXPROBE_FUZZ", "40"))


@pytest.fixture(scope="module", params=["finished", "live", "rotated and cut"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run.mxprobe"
    if request.param != "rotated and cut":
        return synthetic.write_trace(directory, synthetic.Run(steps=2), close=request.param == "finished")
    return rotated_and_cut(directory)


def rotated_and_cut(directory: Path) -> Path:
    """Parts beside live files, as a writer leaves them that was killed after its files had grown; and what compaction
    could not read of an earlier one."""
    writer = TraceWriter(directory, {}, rotate_bytes=3_000)
    for step in range(4):
        writer.append("signals", {"step": [step] * 20, "raw_key": [f"key {i}" for i in range(20)], "value": [0.5] * 20})
        if step:
            writer.append("events", {"step": [step], "kind": ["x"], "detail": ["y" * 50]}, rank=1)
    writer.settle()
    writer.abandon()
    torn = live_path(directory, "events", 1)
    torn.write_bytes(torn.read_bytes()[:-20])
    compact(directory)
    writer = TraceWriter(directory / "more", {})
    writer.append("signals", {"step": [9], "raw_key": ["z"], "value": [1.0]})
    writer.abandon()
    live = live_path(directory, "signals", 0, 90)
    live.parent.mkdir(parents=True, exist_ok=True)
    live_path(directory / "more", "signals", 0).rename(live)
    shutil.rmtree(directory / "more")
    assert cut_files(directory)
    assert len(part_files(directory, "signals")) > 1
    return directory


def files_of(directory: Path) -> list[Path]:
    return sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file() and p.name[0] != ".")


def damage(data: st.DataObject, path: Path) -> None:
    kind = data.draw(st.sampled_from(["cut", "flip", "junk", "empty", "gone", "directory", "loop", "again"]))
    old = path.read_bytes()
    place = data.draw(st.integers(0, max(len(old) - 1, 0)))
    if kind == "cut":
        path.write_bytes(old[:place])
    elif kind == "flip":
        # Near the start and the end lie the headers and the footers, which steer the readers.
        place = data.draw(st.sampled_from([place, min(place, 300), max(len(old) - 1 - place % 300, 0)]))
        new = bytearray(old)
        if new:
            new[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(new)
    elif kind == "junk":
        path.write_bytes(data.draw(st.binary(max_size=200)))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "again":
        path.write_bytes(old + old[:place])
    else:
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)


def read_all(directory: Path) -> int:
    trace = open_trace(directory)
    n_rows = sum(len(trace.table(table)) for table in TABLES)
    for table in TABLES:
        for piece in trace.chunks(table, [TABLES[table][0][0]]):
            assert piece.num_rows > 0
    assert all(isinstance(problem, str) for problem in trace.problems)
    repr(trace)
    return n_rows


def read_or_words(directory: Path) -> int:
    try:
        return read_all(directory)
    except TraceError as error:
        words = str(error)
    assert "likely cause" in words
    return 0


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_trace_is_read_or_refused_with_words(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("damaged") / "run.mxprobe"
    shutil.copytree(whole, directory)
    n_rows = read_all(directory)
    try:
        for name in data.draw(st.lists(st.sampled_from(files_of(directory)), min_size=1, max_size=3, unique=True)):
            damage(data, directory / name)
        # A flipped bit of a value is read as a value: neither Arrow nor Parquet keeps checksums.
        assert read_or_words(directory) <= 2 * n_rows
        with contextlib.suppress(TraceError):
            compact(directory)
        assert read_or_words(directory) <= 2 * n_rows
    finally:
        shutil.rmtree(directory)
