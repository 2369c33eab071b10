"""Following a trace: each value once, a step when it is whole, in the numbers of the export after the fact."""

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from mxprobe.cli import main
from mxprobe.exporting import curves
from mxprobe.exporting.follow import QUIET_S, Follower
from mxprobe.exporting.series import COLUMNS, Point
from mxprobe.trace import TraceWriter, open_trace
from mxprobe.trace.tail import TraceTail
from tests.trace_files import append, frames, write_trace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def read_all(tail: TraceTail, follower: Follower) -> list[Point]:
    found: list[Point] = []
    while rows := tail.poll():
        found += follower.take(rows, is_behind=tail.is_behind)
    return [*found, *follower.take([])]


def values(points: list[Point]) -> dict[tuple[int, str], float]:
    counted = Counter((point.step, tag) for point in points for tag in point.values)
    assert counted.total() == len(counted), counted.most_common(3)
    return {(point.step, tag): value for point in points for tag, value in point.values.items()}


def overhead(*steps: int) -> pd.DataFrame:
    return frames(1, 40)["overhead"].iloc[: len(steps)].assign(step=list(steps))[list(COLUMNS["overhead"])]


def of_step(table: str, step: int) -> pd.DataFrame:
    rows = frames(1, 40)[table]
    return rows[rows["step"] == step][list(COLUMNS[table])]


def steps_of(points: object, tag: str) -> list[int]:
    return [point.step for point in points if any(tag in each for each in point.values)]  # type: ignore[attr-defined]


def test_in_pieces_it_is_what_the_export_of_the_whole_gives(tmp_path: Path) -> None:
    tables = frames(n_layers=1, n_steps=30)
    directory = tmp_path / "run.mxprobe"
    found: list[Point] = []
    follower = Follower(["*.up_proj"])
    with TraceWriter(directory, {}) as writer:
        tail = TraceTail(directory, {name: list(columns) for name, columns in COLUMNS.items()})
        append(writer, {"modules": tables.pop("modules"), "events": tables.pop("events")})
        for step in range(1, 31):
            for name in ("signals", "overhead", "tensors", "outputs"):  # errors after the row that ends their step
                append(writer, {name: tables[name][tables[name]["step"] == step]})
                found += read_all(tail, follower)
    found += read_all(tail, follower)
    found += follower.rest()
    expected = {
        (point.step, tag): value
        for point in curves(open_trace(directory), ["*.up_proj"])
        for tag, value in point.values.items()
    }
    assert values(found) == expected
    assert any("up_proj" in tag and "model.layers" in tag for _, tag in expected)
    assert follower.n_late == 0


def test_a_step_waits_for_every_rank_and_a_metric_for_none() -> None:
    follower = Follower()
    list(follower.take([("overhead", 0, overhead(9)), ("overhead", 1, overhead(9))]))
    metrics = list(follower.take([("signals", 0, of_step("signals", 10))]))
    assert steps_of(metrics, "signals/reward_mean") == [10]
    assert steps_of(list(follower.take([("tensors", 0, of_step("tensors", 10))])), "nmse") == []
    assert steps_of(list(follower.take([("overhead", 0, overhead(10, 11))])), "nmse") == []
    assert steps_of(list(follower.take([])), "nmse") == []  # rank 1 is still at 9
    list(follower.take([("tensors", 1, of_step("tensors", 10)), ("overhead", 1, overhead(10, 11))]))
    assert steps_of(list(follower.take([])), "nmse") == [10]
    assert list(follower.take([("signals", 1, of_step("signals", 10))])) == []


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    clock = Clock()
    follower = Follower(clock=clock)
    list(follower.take([("overhead", 0, overhead(9)), ("overhead", 1, overhead(9))]))
    clock.now = QUIET_S + 1
    list(follower.take([("tensors", 0, of_step("tensors", 10)), ("overhead", 0, overhead(10, 11))]))
    assert steps_of(list(follower.take([])), "nmse") == [10]


def test_no_step_is_settled_by_a_poll_that_left_rows_unread() -> None:
    follower = Follower()
    list(follower.take([("tensors", 0, of_step("tensors", 10)), ("overhead", 0, overhead(10, 11))], is_behind=True))
    assert steps_of(list(follower.take([("overhead", 0, overhead(12))], is_behind=True)), "nmse") == []
    assert steps_of(list(follower.take([])), "nmse") == [10]


def test_late_rows_are_counted_and_left_out() -> None:
    follower = Follower()
    list(follower.take([("tensors", 0, of_step("tensors", 10)), ("overhead", 0, overhead(10, 11))]))
    list(follower.take([]))
    late = of_step("tensors", 10)
    assert list(follower.take([("tensors", 1, late)])) == []
    assert list(follower.rest()) != []  # step 11 alone
    assert follower.n_late == len(late)


def test_a_metric_without_a_step_is_placed_by_its_time() -> None:
    rows = of_step("signals", 10).iloc[:1].assign(step=-1)
    steps = overhead(7, 8, 9).assign(time_ns=[70, 80, 90])
    follower = Follower()
    list(follower.take([("overhead", 0, steps)]))
    found = list(follower.take([("signals", 0, rows.assign(time_ns=85))]))
    (tag,) = {tag for point in found for tag in point.values if tag.startswith("signals/")}
    assert steps_of(found, tag) == [8]


def test_a_finished_trace_is_followed_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trace = write_trace(tmp_path / "done.mxprobe", frames(n_layers=1, n_steps=20))
    run = CliRunner().invoke(
        main, ["export", str(trace), "--to", "tensorboard", "--follow", "-o", str(tmp_path / "runs")]
    )
    assert run.exit_code == 0, run.output
    assert run.stdout.startswith(str(tmp_path / "runs" / "done"))


def test_follow_is_for_trackers(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "done.mxprobe", frames(n_layers=1, n_steps=20))
    refused = CliRunner().invoke(main, ["export", str(trace), "--format", "csv", "--follow"])
    assert refused.exit_code == 2
    assert "--follow goes with --to" in refused.stderr
