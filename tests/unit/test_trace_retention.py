"""Old steps are added up exactly, nothing is lost on the way, and the disk that a trace takes is bounded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mxprobe.attribution import recommend
from mxprobe.schema import CODE_BINS, DELTA_BINS
from mxprobe.tables import TABLES, THINNED
from mxprobe.trace import Retention, TraceWriter, arrow, compact, layout, open_trace, retention
from mxprobe.trace.thinning import Windows, add_up, thinned
from tests import synthetic

MODULES = [f"model.layers.{i}.mlp.up_proj" for i in range(4)]


def rows_of_step(step: int, rng: np.random.Generator) -> dict[str, list[object]]:
    """A `tensors` batch: two roles per module, sums of either sign, now and then a missing value or an infinity."""
    n = 2 * len(MODULES)
    columns: dict[str, list[object]] = {name: rng.standard_normal(n).tolist() for name, _ in TABLES["tensors"]}
    for name, kind in TABLES["tensors"]:
        if kind == "dict":
            columns[name] = ["a"] * n
        if kind in ("int64", "int32"):
            columns[name] = rng.integers(0, 10**6, n).tolist()
    columns |= {
        "step": [step] * n,
        "micro_step": [0] * n,
        "module": MODULES * 2,
        "role": ["x_fwd"] * len(MODULES) + ["w_fwd"] * len(MODULES),
        "phase": ["train"] * n,
        "format": ["mxfp4"] * n,
        "rule": ["rceil" if step < 40 else "even"] * n,
        "delta_hist": rng.integers(0, 99, (n, DELTA_BINS)).tolist(),
        "code_hist": rng.integers(0, 99, (n, CODE_BINS)).tolist(),
    }
    columns["out_e2"][0] = None
    columns["delta_hist"][1] = None
    if step % 7 == 0:
        columns["sum_e2"][2] = float("inf")
        columns["sum_e"][3] = float("nan")
    return columns


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    keys = ["module", "role", "phase", "rule", "rank"]
    numeric = [
        name for name, kind in TABLES["tensors"] if kind in ("int64", "float64") and name not in ("step", "time_ns")
    ]
    finite = frame.assign(**{name: frame[name].where(np.isfinite(frame[name].astype(float))) for name in numeric})
    by = finite.groupby(keys, observed=True)
    sums = by[[name for name in numeric if name not in ("amax", "sampled_frac")]].sum(min_count=1)
    return sums.assign(amax=by["amax"].max(), sampled=by["sampled_frac"].min(), n_steps=by["n_steps"].sum())


def histograms(frame: pd.DataFrame) -> dict[object, list[int]]:
    known = frame[frame["delta_hist"].notna()]
    return {
        key: np.stack(part["delta_hist"].tolist()).sum(0).tolist()
        for key, part in known.groupby(["module", "role", "rule", "rank"], observed=True)
    }


def assert_same_totals(a: pd.DataFrame, b: pd.DataFrame) -> None:
    left, right = totals(a), totals(b)
    pd.testing.assert_frame_equal(left, right, rtol=1e-12, atol=1e-9, check_dtype=False)
    assert histograms(a) == histograms(b)


def write(directory: Path, kept: Retention | None, n_steps: int = 60, rotate_bytes: int = 20_000) -> Path:
    rng = np.random.default_rng(0)
    with TraceWriter(directory, {}, retention=kept, rotate_bytes=rotate_bytes) as writer:
        for step in range(n_steps):
            for rank in (0, 1):
                writer.append("tensors", rows_of_step(step, rng), rank=rank)
            overhead = {
                "step": [step],
                "time_ns": [step],
                "probed": [step % 2 == 0],
                "step_ns": [100],
                "n_dropped": [step],
            }
            writer.append("overhead", overhead)
            writer.append("signals", {"step": [step], "metric": ["reward"], "value": [float(step)]})
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "run.mxprobe", None)


@pytest.mark.parametrize("kept", [Retention(keep_steps=20), Retention(max_bytes=700_000)])
def test_totals_stay_the_same_and_recent_steps_stay_whole(
    whole: Path, tmp_path: Path, kept: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_WINDOWS", 6)
    thin = open_trace(write(tmp_path / "run.mxprobe", kept))
    full = open_trace(whole)
    assert len(thin.tensors()) < len(full.tensors())
    assert_same_totals(thin.tensors(), full.tensors())
    until = thin.run["thinned"]["until"]
    newest = [rows[rows["step"] >= until] for rows in (thin.tensors(), full.tensors())]
    pd.testing.assert_frame_equal(*(rows.reset_index(drop=True) for rows in newest), check_categorical=False)
    assert newest[0]["step"].nunique() >= 4
    spans = thin.tensors()
    assert (spans["last_step"] >= spans["step"]).all()
    assert (spans[spans["step"] >= until]["n_steps"] == 1).all()
    assert not layout.covered_parts(thin.directory, "tensors")
    assert thin.overhead()["step_ns"].sum() == full.overhead()["step_ns"].sum()
    assert thin.overhead()["n_dropped"].max() == full.overhead()["n_dropped"].max()
    pd.testing.assert_frame_equal(thin.signals(), full.signals())
    assert any("sums of several steps" in problem for problem in thin.problems)


def test_the_disk_that_a_trace_takes_is_bounded_all_the_time(tmp_path: Path) -> None:
    limit = 500_000
    rng = np.random.default_rng(0)
    directory, largest = tmp_path / "run.mxprobe", 0
    with TraceWriter(directory, {}, retention=Retention(max_bytes=limit)) as writer:
        for step in range(200):
            writer.append("tensors", rows_of_step(step, rng), rank=step % 3)
            largest = max(largest, size_of(directory))
    assert largest <= limit
    assert 0.3 * limit < size_of(directory) <= limit
    rows = open_trace(directory).tensors()
    assert rows["n_steps"].sum() == 200 * 2 * len(MODULES)
    assert len(layout.part_files(directory, "tensors")) < 20
    widths = (rows["last_step"] - rows["step"])[rows["n_steps"] > 1]
    assert widths.max() > 4 * widths.min()  # the older, the wider


def size_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # put together meanwhile
            continue
    return total


def test_what_cannot_be_added_up_is_said(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", {}, retention=Retention(max_bytes=10_000)) as writer:
        for step in range(120):
            writer.append(
                "events", {"step": [step], "kind": ["x"], "detail": [str(np.random.default_rng(step).bytes(200))]}
            )
    trace = open_trace(tmp_path / "t")
    assert len(trace.events()) == 120
    assert any("more than --max-trace" in problem for problem in trace.problems)


def test_added_up_twice_is_added_up_once(whole: Path) -> None:
    rows = open_trace(whole).arrow("tensors").drop_columns("rank")
    windows = Windows(np.array([0, 10, 20]), 30)
    once = add_up("tensors", rows, windows)
    pd.testing.assert_frame_equal(add_up("tensors", once, windows).to_pandas(), once.to_pandas())
    wider = add_up("tensors", once, Windows(np.array([0]), 30)).to_pandas().assign(rank=0)
    at_once = add_up("tensors", rows, Windows(np.array([0]), 30)).to_pandas().assign(rank=0)
    assert_same_totals(wider, at_once)
    assert len(wider) == len(at_once)


def test_pieces_cut_a_window_anywhere(whole: Path) -> None:
    rows = open_trace(whole).arrow("tensors").drop_columns("rank")
    windows = Windows(np.array([0, 25]), 50)
    first = rows.slice(0, rows.num_rows // 2)  # of one rank: in the order of steps
    pieces = [first.slice(start, 37) for start in range(0, first.num_rows, 37)]
    found = pa.concat_tables(list(thinned("tensors", pieces, windows))).to_pandas().assign(rank=0)
    assert_same_totals(found, first.to_pandas().assign(rank=0))
    assert len(found) == len(add_up("tensors", first, windows))


@pytest.mark.parametrize("table", THINNED)
def test_every_column_of_a_table_that_is_thinned_is_summed_or_said_otherwise(table: str) -> None:
    """Two like rows: what is a sum doubles, what names stays, the rest is the larger or the smaller."""
    columns = {name: arrow.arrow_type(kind, dictionary=False) for name, kind in TABLES[table]}
    ones = {pa.string(): "a", pa.bool_(): True, pa.float64(): 1.5, pa.int64(): 3, pa.int32(): 3}
    values = {name: [ones.get(kind) or [1] * kind.list_size] * 2 for name, kind in columns.items()}
    values["step"] = [1, 2]
    rows = arrow.conform(pa.table(values, schema=pa.schema(list(columns.items()))), table)
    (added,) = add_up(table, rows, Windows(np.array([1]), 3)).to_pylist()
    assert (added.pop("step"), added.pop("n_steps"), added.pop("last_step")) == (1, 2, 2)
    kept = {
        "time_ns",
        "micro_step",
        "sampled_frac",
        "amax",
        "from_step",
        "weight_lag",
        "probe",
        "n_dropped",
        "n_errors",
        "sent_bytes",
    }
    for name, value in added.items():
        before = rows.to_pylist()[0][name]
        same = isinstance(before, (str, bool)) or name in kept
        assert value == (before if same else [2] * len(before) if isinstance(before, list) else 2 * before), name


def test_a_crash_after_the_new_part_doubles_no_row(whole: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.mxprobe"
    shutil.copytree(whole, copy)
    parts = [part for part in layout.part_files(copy, "tensors") if part.rank == 0]
    saved = {part.path: part.path.read_bytes() for part in parts}
    windows = Windows(np.array([0, 30]), 50)
    retention.put_together(copy, "tensors", parts, windows)
    for path, data in saved.items():
        path.write_bytes(data)
    assert_same_totals(open_trace(copy).tensors(), open_trace(whole).tensors())
    layout.write_json(copy / layout.RUN_FILE, {**open_trace(copy).run, "thinned": windows.to_json()})
    compact(copy)
    assert not layout.covered_parts(copy, "tensors")
    assert not any(path.exists() for path in saved)
    thin = open_trace(copy).tensors()
    assert_same_totals(thin, open_trace(whole).tensors())
    assert set(thin["step"].unique()) == {0, 30, *range(50, 60)}  # rank 1 as well: what was begun is done


@pytest.mark.slow
def test_the_verdict_of_a_thinned_trace(tmp_path: Path) -> None:
    directory = synthetic.write_trace(tmp_path / "run.mxprobe", synthetic.Run(steps=12, outlier_gain=32.0))
    before = recommend(open_trace(directory))
    run = open_trace(directory).run
    layout.write_json(directory / layout.RUN_FILE, {**run, "thinned": {"starts": [10, 40], "until": 70}})
    compact(directory)
    trace = open_trace(directory)
    assert sorted(trace.tensors()["step"].unique()) == [10, 40, 70, 80, 90, 100, 110, 120]
    after = recommend(trace)
    assert (after.verdict, after.component, after.chosen) == (before.verdict, before.component, before.chosen)
    gains = ({score.correction: score.gain for score in found.corrections} for found in (before, after))
    for one, other in zip(*(sorted(each.items()) for each in gains), strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-9, nan_ok=True), one[0]


def test_windows_that_are_not_windows_are_none() -> None:
    for data in (None, [], {"until": 3}, {"starts": ["a"], "until": 3}, {"starts": [1], "until": "x"}):
        assert Windows.from_json(data) is None


def test_an_error_that_nobody_expected_stops_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("deque mutated during iteration")

    monkeypatch.setattr(retention.RetentionEnforcer, "enforce", fail)
    with TraceWriter(tmp_path / "t.mxprobe", {}, rotate_bytes=1_000, retention=Retention(keep_s=1.0)) as writer:
        for step in range(20):
            writer.append("events", {"step": [step], "kind": ["x"], "detail": ["y" * 500]})
        writer.settle()
    trace = open_trace(tmp_path / "t.mxprobe")
    assert trace.is_complete
    assert len(trace.events()) == 20
    assert any("deque mutated" in problem for problem in trace.problems)


def test_what_is_seen_meanwhile_disturbs_no_look_back(tmp_path: Path) -> None:
    enforcer = retention.RetentionEnforcer(tmp_path, Retention(keep_s=5000.0), lambda _: None)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            enforcer.enforce(10_000.0)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for second in range(20_000):
            enforcer.observe("tensors", [second], float(second))
        stop.set()
        looking.result()
