"""The live view's parts: reading what is new, keeping what is shown, keys, and a picture that fits."""

import io
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rich.console import Console

from mxprobe.attribution.ratios import mismatch_by_step, output_ratios, tensor_ratios
from mxprobe.errors import AttachError, TraceError
from mxprobe.live import find_trace
from mxprobe.live.controls import SORTS, Controls
from mxprobe.live.keys import parse_keys
from mxprobe.live.state import COLUMNS, LiveState
from mxprobe.live.view import plain_line, render, select_layers, sparkline
from mxprobe.trace import TraceWriter, compact, layout, open_trace
from mxprobe.trace.arrow import live_schema
from mxprobe.trace.tail import TraceTail
from tests import report_frames
from tests.trace_files import append, frames, write_trace


def part_of(tables: dict[str, pd.DataFrame], first: int, last: int) -> dict[str, pd.DataFrame]:
    return {
        name: rows[rows["step"].between(first, last)] if "step" in rows else (rows if first == 1 else rows.iloc[:0])
        for name, rows in tables.items()
    }


def collect(tail: TraceTail, into: dict[str, list[pd.DataFrame]]) -> int:
    rows = tail.poll()
    for table, _, frame in rows:
        into.setdefault(table, []).append(frame)
    return sum(len(frame) for _, _, frame in rows)


def assert_all_rows(found: dict[str, list[pd.DataFrame]], directory: Path) -> None:
    trace = open_trace(directory)
    for table, columns in COLUMNS.items():
        expected = trace.table(table)
        got = pd.concat(found[table], ignore_index=True)
        assert len(got) == len(expected)
        for column in columns:
            if column in ("step", "value", "sum_e2", "realised2", "step_ns", "n_dropped"):
                np.testing.assert_array_equal(got[column], expected[column])


def test_each_row_is_read_once_while_written_and_after_it_is_closed(tmp_path: Path) -> None:
    tables = frames(n_layers=1, n_steps=60)
    directory = tmp_path / "run.mxprobe"
    found: dict[str, list[pd.DataFrame]] = {}
    with TraceWriter(directory, {}) as writer:
        tail = TraceTail(directory, COLUMNS)
        assert collect(tail, found) == 0
        for first, last in ((1, 20), (21, 40)):
            append(writer, part_of(tables, first, last))
            assert collect(tail, found) > 0
            assert collect(tail, found) == 0
        assert tail.state == "recording"
        append(writer, part_of(tables, 41, 60))  # seen only in the parts that closing makes
    assert collect(tail, found) > 0
    assert collect(tail, found) == 0
    assert tail.state == "closed"
    assert_all_rows(found, directory)


def test_a_finished_trace_and_one_whose_writer_died(tmp_path: Path) -> None:
    done = write_trace(tmp_path / "done.mxprobe", frames(n_layers=1, n_steps=20))
    found: dict[str, list[pd.DataFrame]] = {}
    collect(TraceTail(done, COLUMNS), found)
    assert_all_rows(found, done)

    dead = write_trace(tmp_path / "dead.mxprobe", frames(n_layers=1, n_steps=20), close=False)
    tail = TraceTail(dead, COLUMNS)
    found = {}
    collect(tail, found)
    assert tail.state == "writer died"
    compact(dead)
    assert collect(tail, found) == 0
    assert_all_rows(found, dead)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    done = write_trace(tmp_path / "done.mxprobe", {"signals": report_frames.signals(20)})
    part = done / "signals" / "rank=0" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"cannot read .*part-00000.parquet"):
        TraceTail(done, COLUMNS).poll()


def test_half_a_batch_waits_for_its_other_half(tmp_path: Path) -> None:
    directory = tmp_path / "run.mxprobe"
    with TraceWriter(directory, {}) as writer:
        append(writer, {"signals": report_frames.signals(5)})
        path = layout.live_path(directory, "signals", 0)
        tail = TraceTail(directory, COLUMNS)
        assert tail.poll()
        batch = pa.record_batch(
            [
                pa.array([7], field.type) if field.name == "step" else pa.nulls(1, field.type)
                for field in live_schema("signals")
            ],
            schema=live_schema("signals"),
        )
        data = batch.serialize().to_pybytes()
        with open(path, "ab") as file:
            for piece in (data[:3], data[3:50], data[50:-8]):
                file.write(piece)
                file.flush()
                assert tail.poll() == []
            file.write(data[-8:])
        ((_, _, rows),) = tail.poll()
        assert rows["step"].tolist() == [7]


def test_rows_are_read_once_while_live_files_become_parts(tmp_path: Path) -> None:
    directory = tmp_path / "run.mxprobe"
    seen: list[int] = []
    with TraceWriter(directory, {}, rotate_bytes=4000) as writer:
        tail = TraceTail(directory, COLUMNS)
        for step in range(60):
            writer.append("signals", {"step": [step], "metric": ["x" * 100], "value": [0.5]})
            if step % 7 == 0:
                seen += [int(each) for _, _, rows in tail.poll() for each in rows["step"]]
        writer.settle()
        assert len(layout.part_files(directory, "signals")) > 2
    seen += [int(each) for _, _, rows in tail.poll() for each in rows["step"]]
    assert seen == list(range(60))


def test_the_table_holds_the_last_step_of_each_operand() -> None:
    tables = frames(n_layers=1, n_steps=60)
    state = LiveState()
    for first, last in ((1, 30), (31, 60)):
        for name, rows in part_of(tables, first, last).items():
            if name in COLUMNS:
                state.update(name, 0, rows[list(COLUMNS[name])])
    table = state.layer_table()
    last = tables["tensors"][tables["tensors"]["step"] == 60]
    expected = pd.DataFrame(
        {
            "module": last["module"].astype(str),
            "role": last["role"].astype(str),
            "output_error": output_ratios(last)["out_error"],
            "zeros": tensor_ratios(last)["zero_frac"],
        }
    )
    merged = table.merge(expected, on=["module", "role"], suffixes=("", "_expected"))
    assert len(merged) == len(table) == len(last)
    np.testing.assert_allclose(merged["output_error"], merged["output_error_expected"])
    np.testing.assert_allclose(merged["zeros"], merged["zeros_expected"])
    hit = table[(table["role"] == "x_fwd") & table["module"].str.endswith("q_proj")].iloc[0]
    assert hit["component"] == "deadzone"
    outputs = tables["outputs"]
    np.testing.assert_allclose(list(state.series["mismatch"].values()), mismatch_by_step(outputs))
    overhead = tables["overhead"]
    assert state.overhead_frac == pytest.approx(overhead["probe_ns"].sum() / overhead["step_ns"].sum())
    assert state.last_step == 60
    assert state.coverage == pytest.approx(7e9 / (7e9 + 6e8))


def test_ranks_are_added_and_counters_are_not_counted_twice() -> None:
    rows = pd.DataFrame(
        {"step": [1, 2], "step_ns": [10, 10], "probe_ns": [1, 1], "n_dropped": [2, 3], "n_errors": [0, 1]}
    )
    state = LiveState()
    for rank in (0, 1):
        state.update("overhead", rank, rows)
    assert (state.n_dropped, state.n_errors) == (6, 2)
    assert state.overhead_frac == pytest.approx(0.1)
    assert state.steps_per_s == pytest.approx(1e8)


def test_memory_stays_bounded() -> None:
    state = LiveState()
    for start in range(0, 3000, 100):
        signals = report_frames.signals(100)
        state.update("signals", 0, signals.assign(step=signals["step"] + start)[list(COLUMNS["signals"])])
        outputs = report_frames.outputs(["a", "b"], [start + 1, start + 2])
        state.update("outputs", 0, outputs[list(COLUMNS["outputs"])])
    assert {len(points) for metric, points in state.series.items() if metric != "mismatch"} == {400}
    assert len(state._outputs) <= 8  # pyright: ignore[reportPrivateUsage]


def full_state(n_layers: int = 1) -> LiveState:
    state = LiveState()
    for name, rows in frames(n_layers=n_layers, n_steps=60).items():
        if name in COLUMNS:
            state.update(name, 0, rows[list(COLUMNS[name])])
    return state


def drawn(state: LiveState, controls: Controls, width: int, height: int, *, ascii_only: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height)
    console.print(
        render(state, controls, name="n", status="recording", width=width, height=height, ascii_only=ascii_only)
    )
    return stream.getvalue()


@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 40), (80, 24), (60, 24), (40, 20), (20, 20)])
def test_the_picture_fits_the_terminal(width: int, height: int) -> None:
    lines = drawn(full_state(n_layers=8), Controls(), width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "output" in "".join(lines)


def test_a_short_terminal_keeps_its_rows_for_operands_before_events() -> None:
    state = full_state(n_layers=8)
    assert state.events
    tall, short = (drawn(state, Controls(), 100, height) for height in (40, 16))
    assert all(event in tall for event in state.events)
    assert not any(event in short for event in state.events)
    assert sum("proj" in line for line in short.splitlines()) >= 4


def test_an_empty_state_draws_and_says_there_is_no_step() -> None:
    assert "no step yet" in drawn(LiveState(), Controls(), 100, 30)


def test_ascii_terminals_get_ascii() -> None:
    body = drawn(full_state(), Controls(is_shown_once=True), 100, 40, ascii_only=True)
    assert not any(bar in body for bar in "▁▂▃▄▅▆▇█")


def test_hostile_names_reach_neither_markup_nor_terminal() -> None:
    names = ["[red]x[/]", "bell\x07\x1b[2J", "新しい", "x" * 300]
    rows = report_frames.tensors(names, [1])
    state = LiveState()
    state.update("tensors", 0, rows[list(COLUMNS["tensors"])])
    body = drawn(state, Controls(), 200, 60)
    assert "[red]x[/]" in body
    assert "新しい" in body
    assert "\x07" not in body
    assert "\x1b" not in plain_line(state)


def test_missing_numbers_are_dashes() -> None:
    rows = report_frames.tensors(["a"], [1]).assign(out_ref2=math.nan, sum_e2=math.nan)
    state = LiveState()
    state.update("tensors", 0, rows[list(COLUMNS["tensors"])])
    assert "nan" not in drawn(state, Controls(), 120, 40)


def test_plain_line_says_all_in_one_line() -> None:
    line = plain_line(full_state())
    assert line.startswith("step 60  reward 0.")
    for words in ("entropy", "mismatch", "worst model.layers.0.", "overhead", "dropped 0"):
        assert words in line
    assert "\n" not in line


def test_sorting_and_filtering() -> None:
    table = full_state().layer_table()
    controls = Controls()
    by_error = select_layers(table, controls)["output_error"].to_numpy()
    assert (np.diff(by_error) <= 0).all()
    controls.press("r")
    assert (np.diff(select_layers(table, controls)["output_error"].to_numpy()) >= 0).all()
    for _ in SORTS:
        controls.press("s")
    assert controls.sort == SORTS[0]
    for key in "/up_proj":
        controls.press(key)
    assert controls.typing == "up_proj"
    assert set(select_layers(table, controls)["module"]) == {"model.layers.0.mlp.up_proj"}  # while typing, too
    controls.press("enter")
    assert (controls.filter, controls.typing) == ("up_proj", None)
    controls.press("/")
    for key in ("backspace",) * 7 + tuple("*.q_proj x_*"):
        controls.press(key)
    controls.press("enter")
    assert set(select_layers(table, controls)["role"]) == {"x_fwd", "x_wgrad"}
    controls.press("escape")
    assert len(select_layers(table, controls)) == len(table)


def test_q_is_a_letter_while_a_filter_is_typed() -> None:
    controls = Controls()
    for key in ("/", "q"):
        controls.press(key)
    assert not controls.has_quit
    controls.press("escape")
    controls.press("p")
    assert controls.is_paused
    controls.press("q")
    assert controls.has_quit


def test_scrolling_stops_at_the_ends() -> None:
    state, controls = full_state(), Controls()
    for _ in range(500):
        controls.press("j")
    drawn(state, controls, 100, 24)
    assert 0 < controls.offset < 42
    for _ in range(500):
        controls.press("k")
    assert controls.offset == 0


def test_keys_are_told_apart() -> None:
    assert parse_keys("q/\r") == ["q", "/", "enter"]
    assert parse_keys("\x1b[A\x1b[Bj") == ["up", "down", "j"]
    assert parse_keys("\x1b") == ["escape"]
    assert parse_keys("\x1b[99~") == []
    assert parse_keys("\x7f") == ["backspace"]


def test_sparklines_show_order_not_size() -> None:
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert sparkline([0.0, 1.0], 10, ascii_only=True) == "_#"


def test_a_pid_that_is_not_attached_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttachError, match="is not attached"):
        find_trace(str(os.getpid()), say=lambda _: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "123").mkdir()
    assert find_trace("123", say=lambda _: None) == Path("123")  # a directory of that name
