"""A trace opens whatever happened to its writer, and says what is wrong with it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from mxprobe.errors import TraceError
from mxprobe.schema import SCHEMA_VERSION
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, arrow, compact, layout, open_trace
from mxprobe.trace.arrow import arrow_type, conform

N_BATCHES = 4


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A trace as a killed writer leaves it: live files, nobody holding the lock."""
    writer = TraceWriter(tmp_path / "original", {"command_line": ["train.py"]})
    for step in range(N_BATCHES):
        writer.append("events", {"step": [step, step], "time_ns": [1_700_000_000_000_000_000] * 2, "kind": ["a", "b"]})
    shutil.copytree(tmp_path / "original", tmp_path / "run.mxprobe")
    writer.close()
    return tmp_path / "run.mxprobe"


def live_events(directory: Path) -> Path:
    return layout.live_path(directory, "events", 0)


def set_run(directory: Path, **fields: object) -> None:
    run = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**run, **fields}))


def test_a_dead_writer_is_noticed(abandoned: Path) -> None:
    trace = open_trace(abandoned)
    assert len(trace.events()) == 2 * N_BATCHES
    assert not trace.is_complete
    assert not trace.is_live
    assert trace.problems == ["The writer died before closing the trace; the last row is of 2023-11-14 22:13:20 UTC."]


def test_a_living_writer_is_noticed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {})
    writer.append("events", {"step": [1]})
    trace = open_trace(tmp_path / "t")
    assert trace.is_live
    assert trace.problems == [f"The trace is still being written, by process {os.getpid()}."]
    with pytest.raises(TraceError, match="still being written"):
        compact(tmp_path / "t")
    writer.close()
    assert not open_trace(tmp_path / "t").is_live


def test_every_complete_batch_of_a_cut_file_is_read(abandoned: Path) -> None:
    """Cut at every byte: the batches before the cut come back, and a cut inside a batch is reported."""
    whole = live_events(abandoned).read_bytes()
    seen: set[int] = set()
    for size in (*range(0, len(whole), 23), len(whole)):
        live_events(abandoned).write_bytes(whole[:size])
        trace = open_trace(abandoned)
        rows = trace.events()
        assert rows["step"].tolist() == [step for step in range(len(rows) // 2) for _ in "ab"]
        cut = [problem for problem in trace.problems if "is cut after" in problem]
        assert len(cut) == (0 < size < len(whole) and not _is_boundary(whole, size))
        if cut:
            assert f"after {len(rows) // 2} batches" in cut[0]
        seen.add(len(rows))
    assert seen == {2 * n for n in range(N_BATCHES + 1)}


def _is_boundary(whole: bytes, size: int) -> bool:
    messages = [whole.index(b"\xff\xff\xff\xff")]
    at = 0
    while (at := whole.find(b"\xff\xff\xff\xff", at + 1)) >= 0:
        messages.append(at)
    return size in messages


def test_garbage_after_the_last_batch_loses_nothing_before_it(abandoned: Path) -> None:
    with open(live_events(abandoned), "ab") as file:
        file.write(os.urandom(64))
    assert len(open_trace(abandoned).events()) == 2 * N_BATCHES


def test_compact_finishes_a_dead_trace(abandoned: Path) -> None:
    before = open_trace(abandoned).events()
    compact(abandoned)
    assert not (abandoned / "live").exists()
    after = open_trace(abandoned)
    assert after.events().equals(before)
    assert not after.is_complete
    assert after.run["compacted_after_death"] is True
    compact(abandoned)
    assert open_trace(abandoned).events().equals(before)


def test_a_crash_between_part_and_removal_doubles_no_row(abandoned: Path) -> None:
    live = live_events(abandoned).read_bytes()
    compact(abandoned)
    live_events(abandoned).parent.mkdir(parents=True)
    live_events(abandoned).write_bytes(live)
    assert len(open_trace(abandoned).events()) == 2 * N_BATCHES
    compact(abandoned)
    assert len(open_trace(abandoned).events()) == 2 * N_BATCHES


def test_large_tables_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "ROWS_PER_PIECE", 10)
    with TraceWriter(tmp_path / "t", {}) as writer:
        for step in range(7):
            writer.append("events", {"step": [step] * 4, "kind": [f"kind {step}"] * 4})
    assert open_trace(tmp_path / "t").events()["kind"].tolist() == [f"kind {s}" for s in range(7) for _ in range(4)]


def test_an_unfinished_part_is_ignored(abandoned: Path) -> None:
    folder = abandoned / "events" / "rank=0"
    folder.mkdir(parents=True)
    (folder / ".part-00000.parquet.tmp").write_bytes(b"PAR1 half")
    assert len(open_trace(abandoned).events()) == 2 * N_BATCHES


def test_a_damaged_part_is_said_in_words(abandoned: Path) -> None:
    compact(abandoned)
    part = abandoned / "events" / "rank=0" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(TraceError, match=r"cannot read .*part-00000"):
        open_trace(abandoned).events()


def test_an_empty_trace_opens_and_says_so(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t", {}).close()
    trace = open_trace(tmp_path / "t")
    assert trace.problems == ["The trace is empty: no table has a row."]
    for table in TABLES:
        frame = trace.table(table)
        assert frame.empty
        assert list(frame.columns) == [*arrow.table_schema(table).names, "rank"]
    assert trace.modules().empty


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such directory"),
        (lambda path: path.write_text("x"), "it is a file"),
        (lambda path: path.mkdir(), "is not a trace"),
    ],
)
def test_what_is_not_a_trace(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "t")
    with pytest.raises(TraceError, match=message) as caught:
        open_trace(tmp_path / "t")
    assert caught.value.remedy


def test_a_half_written_run_file(abandoned: Path, tmp_path: Path) -> None:
    (abandoned / "run.json").write_text('{"schema_version": 1, "pid"')
    trace = open_trace(abandoned)
    assert len(trace.events()) == 2 * N_BATCHES
    assert any("run.json is half written" in problem for problem in trace.problems)
    compact(abandoned)
    assert len(open_trace(abandoned).events()) == 2 * N_BATCHES
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "run.json").write_text("{")
    with pytest.raises(TraceError, match="half written"):
        open_trace(alone)


def test_nobody_is_called_dead_on_the_word_of_a_torn_run_file(abandoned: Path) -> None:
    compact(abandoned)
    (abandoned / "run.json").write_text("{")
    assert [problem[:24] for problem in open_trace(abandoned).problems] == ["run.json is half written"]


def test_a_missing_run_file(abandoned: Path) -> None:
    (abandoned / "run.json").unlink()
    trace = open_trace(abandoned)
    assert trace.run == {}
    assert any("run.json is missing" in problem for problem in trace.problems)


def test_schema_versions(abandoned: Path) -> None:
    set_run(abandoned, schema_version=SCHEMA_VERSION, schema_minor=99)
    assert any("newer schema 1.99" in problem for problem in open_trace(abandoned).problems)
    set_run(abandoned, schema_version="one")
    assert any("does not say which schema version" in problem for problem in open_trace(abandoned).problems)
    set_run(abandoned, schema_version=SCHEMA_VERSION + 1, mxprobe="9.0")
    with pytest.raises(TraceError, match="schema version 2; this mxprobe reads up to 1") as caught:
        open_trace(abandoned)
    assert "9.0" in str(caught.value)
    assert "upgrade" in caught.value.remedy


def test_the_last_row_of_a_module_wins(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", {}) as writer:
        for rank in (0, 1):
            writer.append("modules", {"module": ["a", "b"], "train_rows": [None, None]}, rank=rank)
            writer.append("modules", {"module": ["a"], "train_rows": [64 + rank]}, rank=rank)
    rows = open_trace(tmp_path / "t").modules()
    assert sorted(zip(rows["rank"], rows["module"], rows["train_rows"].fillna(0), strict=True)) == [
        (0, "a", 64),
        (0, "b", 0),
        (1, "a", 65),
        (1, "b", 0),
    ]


@pytest.mark.parametrize("compacted", [True, False])
def test_columns_can_be_chosen(abandoned: Path, compacted: bool) -> None:
    if compacted:
        compact(abandoned)
    first = open_trace(abandoned).table("events", ("kind",))
    assert list(first.columns) == ["kind", "rank"]
    assert first["kind"].tolist() == ["a", "b"] * N_BATCHES
    trace = open_trace(abandoned)
    trace.events()
    assert trace.table("events", ("kind",)).equals(first)
    assert not any("empty" in problem for problem in open_trace(abandoned).problems)


def test_frames_are_independent(abandoned: Path) -> None:
    trace = open_trace(abandoned)
    changed = trace.events()
    changed["step"] = -1
    assert trace.events()["step"].min() == 0


def test_files_that_are_not_ours_are_ignored(abandoned: Path) -> None:
    for name in (
        "live/rank=x/events-00000.arrows",
        "live/rank=0/secrets-00000.arrows",
        "live/rank=0/events-x.arrows",
        "events/rank=-1/part-00000.parquet",
    ):
        path = abandoned / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"?")
    assert len(open_trace(abandoned).events()) == 2 * N_BATCHES


def test_repr(abandoned: Path) -> None:
    trace = open_trace(abandoned)
    assert "not closed" in repr(trace)
    page = trace._repr_html_()
    assert "The writer died" in page
    assert len(page) < 2000


def test_conform_refuses_another_type() -> None:
    with pytest.raises(TraceError, match="column step holds string"):
        conform(pa.table({"step": ["a"]}), "events")


def test_every_type_name_of_the_schema_is_known() -> None:
    for columns in TABLES.values():
        for _, kind in columns:
            assert arrow_type(kind, dictionary=True) is not None
    with pytest.raises(ValueError, match="unknown type name"):
        arrow_type("int7", dictionary=True)
