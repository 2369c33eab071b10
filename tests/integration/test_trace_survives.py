"""The trace against real deaths and foreign readers: kill -9, DuckDB, a reader beside a writer."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mxprobe.trace import compact, open_trace
from tests import synthetic

WRITER = """
import sys
import time
from pathlib import Path
from mxprobe.trace import Retention, TraceWriter

kept = Retention(max_bytes=int(sys.argv[3]) or None)
facts = {"from": "a process that will be killed"}
writer = TraceWriter(Path(sys.argv[1]), facts, rotate_bytes=int(sys.argv[2]), retention=kept)
step = 0
while True:
    writer.append("tensors", {"step": [step] * 8, "module": [f"m{i}" for i in range(8)], "sum_e2": [0.5] * 8})
    writer.append("events", {"step": [step], "kind": ["x"]}, rank=1)
    print(step, flush=True)
    step += 1
    time.sleep(0.001)
"""


def killed(directory: Path, *, acknowledged: int, rotate_bytes: int = 2**26, max_bytes: int = 0) -> int:
    """Kill a writer once it has said so many steps are written; returns the last step that it said was."""
    with writing(directory, rotate_bytes, max_bytes) as writer:
        assert writer.stdout is not None
        last = -1
        while last < acknowledged:
            last = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        return max([last, *(int(line) for line in writer.stdout if line.endswith("\n"))])


@contextmanager
def writing(directory: Path, rotate_bytes: int, max_bytes: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(directory), str(rotate_bytes), str(max_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def check_nothing_lost(directory: Path, last: int) -> None:
    for finish in (False, True):
        if finish:
            compact(directory)
        trace = open_trace(directory)
        rows = trace.tensors()
        assert not any(rows.groupby("step").size() % 8)  # of a window, once per part
        by_module = rows.groupby("module", observed=True)
        n_steps, halves = by_module["n_steps"].sum(), by_module["sum_e2"].sum()
        assert len(set(n_steps)) == 1
        assert n_steps.iloc[0] in (last + 1, last + 2)  # one more may have been written and not said so
        assert (halves == 0.5 * n_steps).all()
        assert sorted(rows["last_step"].unique())[-1] == n_steps.iloc[0] - 1
        assert len(trace.events()) >= last + 1
        assert any("writer died" in problem for problem in trace.problems)


@pytest.mark.parametrize(("acknowledged", "rotate_bytes"), [(1, 2**26), (40, 2**26), (40, 20_000)])
def test_kill_9_loses_nothing_that_append_returned_for(tmp_path: Path, acknowledged: int, rotate_bytes: int) -> None:
    last = killed(tmp_path / "run.mxprobe", acknowledged=acknowledged, rotate_bytes=rotate_bytes)
    check_nothing_lost(tmp_path / "run.mxprobe", last)


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """In the writer's first batches, between them, while a live file becomes a part or old parts are put together.

    `MXPROBE_KILLS=500` for more.
    """
    rng = random.Random(0)
    for attempt in range(int(os.environ.get("MXPROBE_KILLS", "25"))):
        directory = tmp_path / f"{attempt}.mxprobe"
        rotate_bytes = rng.choice([1, 5_000, 20_000, 2**26])
        limits = {"rotate_bytes": rotate_bytes, "max_bytes": rng.choice([0, 100_000, 400_000])}
        last = killed(directory, acknowledged=rng.randrange(60), **limits)
        check_nothing_lost(directory, last)
        shutil.rmtree(directory)


def test_a_reader_beside_a_writer_sees_whole_batches(tmp_path: Path) -> None:
    directory = tmp_path / "run.mxprobe"
    with writing(directory, rotate_bytes=20_000) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(10):
            for _ in range(5):
                last = int(writer.stdout.readline())
            trace = open_trace(directory)
            counts = trace.tensors().groupby("step").size()
            assert set(counts) == {8}
            assert len(counts) > last
            assert trace.problems == [f"The trace is still being written, by process {writer.pid}."]


def test_duckdb_reads_it_as_it_is(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    directory = synthetic.write_trace(tmp_path / "run.mxprobe", synthetic.Run(steps=2))
    rows = open_trace(directory).tensors()
    query = f"""
        SELECT module, role, rank, sum(sum_e2) / sum(sum_x2) AS nmse
        FROM read_parquet('{directory}/tensors/*/*.parquet', hive_partitioning = true)
        GROUP BY ALL
    """
    found = {(module, role, rank): nmse for module, role, rank, nmse in duckdb.sql(query).fetchall()}
    sums = rows.groupby(["module", "role", "rank"], observed=True)[["sum_e2", "sum_x2"]].sum()
    expected = (sums["sum_e2"] / sums["sum_x2"]).to_dict()
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], rel=1e-12) for key in found)
