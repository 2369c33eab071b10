"""A trace that is written elsewhere, copied while it grows; two of them become one."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from mxprobe.attach import joined_trace
from mxprobe.attach.joined_trace import Changes, JoinedTrace, Piece, changes_since
from mxprobe.errors import TraceError
from mxprobe.trace import TraceWriter, open_trace
from mxprobe.trace.layout import live_files


def signals(step: int, value: float) -> dict[str, list[object]]:
    names = ("source", "framework", "raw_key", "metric")
    return {"step": [step], "time_ns": [step], "value": [value], **{name: ["x"] for name in names}}


def writer(directory: Path, *ranks: int) -> TraceWriter:
    made = TraceWriter(directory, {"command_line": ["there"], "ranks": [{"rank": rank, "pid": 7} for rank in ranks]})
    for rank in ranks:
        made.append("signals", signals(1, float(rank)), rank=rank)
    return made


def pull(joined: JoinedTrace, node: str, directory: Path) -> None:
    while True:
        changes = changes_since(directory, joined.known(node))
        joined.apply(node, changes)
        if changes.is_all:
            return


def values(directory: Path) -> list[tuple[int, int, float]]:
    rows = open_trace(directory).signals()
    return sorted(zip(rows["rank"], rows["step"], rows["value"], strict=True))


@pytest.mark.parametrize("chunk_bytes", [joined_trace.CHUNK_BYTES, 100])
def test_two_nodes_become_one_trace_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(joined_trace, "CHUNK_BYTES", chunk_bytes)
    a, b, here = (tmp_path / name for name in ("a", "b", "here"))
    of_a, of_b, joined = writer(a, 0, 1), writer(b, 0), JoinedTrace(here, {"command_line": ["here"]})
    pull(joined, "a", a)
    pull(joined, "b", b)
    assert values(here) == [(0, 1, 0.0), (1, 1, 1.0), (2, 1, 0.0)]
    of_a.append("signals", signals(2, 5.0), rank=1)
    of_b.append("signals", signals(2, 6.0), rank=0)
    pull(joined, "a", a)
    pull(joined, "b", b)
    grown = [(0, 1, 0.0), (1, 1, 1.0), (1, 2, 5.0), (2, 1, 0.0), (2, 2, 6.0)]
    assert values(here) == grown
    run = open_trace(here).run
    assert [(rank["rank"], rank["node"]) for rank in run["ranks"]] == [(0, "a"), (1, "a"), (2, "b")]
    assert (run["command_line"], run["closed_ns"]) == (["here"], None)
    for each, node, directory in ((of_a, "a", a), (of_b, "b", b)):
        each.close()
        pull(joined, node, directory)
    joined.close()
    assert values(here) == grown
    assert not live_files(here)
    assert open_trace(here).run["closed_ns"]
    assert not [path for path in here.rglob(".*") if path.name.endswith(".tmp")]


def test_nothing_new_is_nothing(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    of_there, joined = writer(there, 0), JoinedTrace(here, {})
    pull(joined, "a", there)
    assert changes_since(there, joined.known("a")).pieces == []
    of_there.close()
    joined.close()


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "tensors/../../evil", ".writer.lock"])
def test_a_file_name_leads_nowhere_else(tmp_path: Path, path: str) -> None:
    joined = JoinedTrace(tmp_path / "here", {})
    with pytest.raises(TraceError, match="none of a trace"):
        joined.apply("a", Changes([Piece(path, 1, 0, b"x", 1)], [path], True))
    joined.close()
    assert sorted(each.name for each in tmp_path.rglob("*")) == [".writer.lock", "here"]


def test_a_directory_that_holds_a_trace_is_left_alone(tmp_path: Path) -> None:
    writer(tmp_path / "taken", 0).close()
    with pytest.raises(TraceError, match="already holds a trace"):
        JoinedTrace(tmp_path / "taken", {})


def test_a_file_that_is_replaced_before_it_is_opened_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    of_there, joined = writer(there, 0), JoinedTrace(here, {})

    def open_replaced(file: Path, mode: str) -> IO[bytes]:
        if file == there / "run.json":
            of_there.update_run(more="x" * 500)
        return open(file, mode)

    monkeypatch.setattr(joined_trace, "open", open_replaced, raising=False)
    pull(joined, "a", there)
    assert open_trace(here).run["more"] == "x" * 500
    of_there.close()
    joined.close()


def test_a_live_file_that_becomes_a_part_is_never_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    of_there, joined = writer(there, 0), JoinedTrace(here, {})
    pull(joined, "a", there)
    listed = joined_trace.files_of

    def compacted_meanwhile(directory: Path) -> list[tuple[str, Path]]:
        found = list(listed(directory))
        of_there.close()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(joined_trace, "files_of", compacted_meanwhile)
        changes = changes_since(there, joined.known("a"))
    assert not changes.is_all
    joined.apply("a", changes)
    assert values(here) == [(0, 1, 0.0)]
    pull(joined, "a", there)
    assert values(here) == [(0, 1, 0.0)]
    joined.close()


def test_live_files_are_listed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    of_there = writer(there, 0)
    below = joined_trace.files_below

    def compacted_after(directory: Path) -> list[Path]:
        found = list(below(directory))
        of_there.close()
        return found

    monkeypatch.setattr(joined_trace, "files_below", compacted_after)
    names = [path for path, _ in joined_trace.files_of(there)]
    assert any(path.startswith(("signals/", "live/")) for path in names)


def test_each_node_says_what_it_added_up(tmp_path: Path) -> None:
    joined = JoinedTrace(tmp_path / "here", {})
    for node, until in (("a", 8), ("b", 16)):
        there = tmp_path / node
        with writer(there, 0) as of_there:
            of_there.update_run(thinned={"starts": [0], "until": until}, excess_bytes=until)
        pull(joined, node, there)
        if node == "a":
            assert open_trace(tmp_path / "here").run["thinned"]["until"] == 8
    joined.close()
    trace = open_trace(tmp_path / "here")
    assert "thinned" not in trace.run
    assert {node: told["until"] for node, told in trace.run["thinned_by_node"].items()} == {"a": 8, "b": 16}
    assert trace.run["excess_bytes"] == 24
    assert sum("kept as sums" in problem for problem in trace.problems) == 2
