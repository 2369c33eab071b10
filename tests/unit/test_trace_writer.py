"""What the writer accepts, refuses and leaves on disk."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mxprobe.errors import EXIT_TRACE, TraceError
from mxprobe.schema import DELTA_BINS
from mxprobe.tables import SPAN, TABLES
from mxprobe.trace import TraceWriter, compact, layout, open_trace

NAMES = ["model.layers.0.mlp.up_proj", "größe[bold]", "模型.层", "a\u0000b", "x" * 300, "</script>", ""]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run.mxprobe"


def event(step: int) -> dict[str, list[object]]:
    return {"step": [step], "time_ns": [step], "kind": ["attached"], "detail": ["…"]}


def test_rows_come_back_with_every_column(directory: Path) -> None:
    with TraceWriter(directory, {"pid": 7}) as writer:
        writer.append(
            "tensors",
            {"step": [1, 2], "module": ["a", "b"], "n": [3, None], "delta_hist": [list(range(DELTA_BINS)), None]},
        )
    trace = open_trace(directory)
    rows = trace.tensors()
    assert list(rows.columns) == [*(name for name, _ in (*TABLES["tensors"], *SPAN)), "rank"]
    assert rows["module"].tolist() == ["a", "b"]
    assert list(rows["delta_hist"].iloc[0]) == list(range(DELTA_BINS))
    assert rows["sum_e2"].isna().all()
    assert trace.run["pid"] == 7
    assert trace.is_complete
    assert trace.problems == []


@pytest.mark.parametrize("closed", [True, False])
def test_any_name_survives(directory: Path, closed: bool) -> None:
    writer = TraceWriter(directory, {})
    writer.append("modules", {"module": NAMES, "reason": NAMES, "shape": [[1, 2]] * len(NAMES)})
    if closed:
        writer.close()
    rows = open_trace(directory).modules()
    assert rows["module"].tolist() == NAMES
    assert rows["reason"].tolist() == NAMES
    writer.close()


def test_rows_are_readable_before_close(directory: Path) -> None:
    writer = TraceWriter(directory, {})
    for step in range(5):
        writer.append("events", event(step))
        assert open_trace(directory).events()["step"].tolist() == list(range(step + 1))
    writer.close()


def test_ranks_are_kept_apart(directory: Path) -> None:
    with TraceWriter(directory, {}) as writer:
        for rank in (0, 1, 12):
            writer.append("events", event(rank), rank=rank)
    events = open_trace(directory).events()
    assert events["rank"].tolist() == events["step"].tolist() == [0, 1, 12]


def test_close_leaves_parquet_only(directory: Path) -> None:
    writer = TraceWriter(directory, {})
    writer.append("events", event(1))
    writer.close()
    writer.close()
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == {"run.json", layout.LOCK_FILE, "events/rank=0/part-00000.parquet"}


def test_parquet_is_compressed_as_the_design_says(directory: Path) -> None:
    with TraceWriter(directory, {}) as writer:
        writer.append("tensors", {"step": [1] * 100, "module": ["a"] * 100, "sum_e2": [float(i) for i in range(100)]})
    group = pq.ParquetFile(directory / "tensors/rank=0/part-00000.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["sum_e2"].encodings
    assert "RLE_DICTIONARY" in columns["module"].encodings


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        ("../../etc", {"step": [1]}, "no table named '../../etc'"),
        ("tensors", {"step": [1], "no_such": [1]}, "no column 'no_such'"),
        ("events", {"step": [1, 2], "kind": ["a"]}, "unequal length"),
        ("events", {"step": ["one"], "kind": ["a"]}, "column step"),
        ("events", {"step": [2**63], "kind": ["a"]}, "column step"),
        ("tensors", {"step": [1], "delta_hist": [[1, 2]]}, "column delta_hist"),
        ("events", {"step": [1], "detail": ["\ud800"]}, "column detail"),
    ],
)
def test_bad_rows_are_refused_in_words(directory: Path, table: str, columns: dict, message: str) -> None:
    with TraceWriter(directory, {}) as writer:
        with pytest.raises(TraceError, match=message) as caught:
            writer.append(table, columns)
        assert caught.value.exit_code == EXIT_TRACE
        writer.append("events", event(1))
    trace = open_trace(directory)
    assert len(trace.events()) == 1
    assert len(trace.tensors()) == 0


def test_an_existing_trace_is_not_overwritten(directory: Path) -> None:
    with TraceWriter(directory, {"first": True}) as writer:
        with pytest.raises(TraceError, match="already holds a trace"):
            TraceWriter(directory, {})
        writer.append("events", event(1))
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(directory, {})
    assert open_trace(directory).run["first"] is True


def test_other_files_in_the_directory_are_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "attach.log").write_text("mine")
    TraceWriter(directory, {}).close()
    assert (directory / "attach.log").read_text() == "mine"


def test_a_file_in_the_way_is_said_in_words(directory: Path) -> None:
    directory.write_text("not a directory")
    with pytest.raises(TraceError, match="cannot write a trace to"):
        TraceWriter(directory, {})


def test_rows_after_close_are_refused(directory: Path) -> None:
    writer = TraceWriter(directory, {})
    writer.close()
    with pytest.raises(TraceError, match="is closed"):
        writer.append("events", event(1))


def test_update_run_replaces_the_file_at_once(directory: Path) -> None:
    with TraceWriter(directory, {"a": 1}) as writer:
        before = os.stat(directory / "run.json").st_ino
        writer.update_run(a=2, cmdline=["python", "\udcff.py"])
        assert os.stat(directory / "run.json").st_ino != before
        assert json.loads((directory / "run.json").read_text())["a"] == 2
        assert open_trace(directory).run["cmdline"] == ["python", "\udcff.py"]


@contextmanager
def files_of_at_most(n_bytes: int) -> Generator[None, None, None]:
    """RLIMIT_FSIZE stands in for a full disk: the kernel takes part of what is written, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_keeps_what_was_written(directory: Path) -> None:
    writer = TraceWriter(directory, {})
    writer.append("events", event(1))
    size = os.stat(layout.live_path(directory, "events", 0)).st_size
    with files_of_at_most(size + 100), pytest.raises(TraceError, match="cannot write to table events"):
        writer.append("events", event(2))
    writer.append("events", event(3))
    assert open_trace(directory).events()["step"].tolist() == [1, 3]
    writer.close()
    assert open_trace(directory).events()["step"].tolist() == [1, 3]


def test_a_disk_that_is_full_at_the_end_leaves_the_live_rows(directory: Path) -> None:
    writer = TraceWriter(directory, {})
    writer.append("events", event(1))
    with files_of_at_most(100), pytest.raises(TraceError, match="File too large") as caught:
        writer.close()
    assert caught.value.exit_code == EXIT_TRACE
    assert "live" in (caught.value.remedy or "")
    assert not list(directory.rglob("*.tmp"))
    assert open_trace(directory).events()["step"].tolist() == [1]
    compact(directory)
    assert open_trace(directory).events()["step"].tolist() == [1]


def test_a_full_disk_refuses_the_run_file_in_words(directory: Path) -> None:
    writer = TraceWriter(directory, {"a": 1})
    with files_of_at_most(10), pytest.raises(TraceError, match="cannot write run"):
        writer.update_run(a=2)
    assert open_trace(directory).run["a"] == 1
    assert not list(directory.glob("*.tmp"))
    writer.close()


def test_no_rows_make_no_file(directory: Path) -> None:
    with TraceWriter(directory, {}) as writer:
        writer.append("events", {name: [] for name, _ in TABLES["events"]})
        assert not (directory / "live").exists()


def test_a_live_file_that_has_grown_becomes_a_part(directory: Path) -> None:
    with TraceWriter(directory, {}, rotate_bytes=4000) as writer:
        for step in range(40):
            writer.append("events", {"step": [step], "kind": ["x" * 100]}, rank=1)
            assert open_trace(directory).events()["step"].tolist() == list(range(step + 1))
        writer.settle()
        parts = len(layout.part_files(directory, "events"))
        assert parts > 3
        assert [file.number for file in layout.live_files(directory)] == [parts]
    assert open_trace(directory).events()["step"].tolist() == list(range(40))


def test_a_part_that_cannot_be_made_stays_a_live_file(directory: Path) -> None:
    with TraceWriter(directory, {}, rotate_bytes=1) as writer:
        in_the_way = directory / "events"
        in_the_way.write_text("")
        for step in range(3):
            writer.append("events", event(step))
        writer.settle()
        assert len(layout.live_files(directory)) == 3
        assert open_trace(directory).events()["step"].tolist() == [0, 1, 2]
        in_the_way.unlink()
    assert open_trace(directory).events()["step"].tolist() == [0, 1, 2]
    assert len(layout.part_files(directory, "events")) == 3
