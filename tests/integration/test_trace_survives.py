"""The trace against real deaths and foreign readers: kill -9, DuckDB, a reader beside a writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mxprobe.trace import compact, open_trace
from tests import synthetic

WRITER = """
import sys
import time
from pathlib import Path
from mxprobe.trace import TraceWriter

writer = TraceWriter(Path(sys.argv[1]), {"from": "a process that will be killed"})
step = 0
while True:
    writer.append("tensors", {"step": [step] * 8, "module": [f"m{i}" for i in range(8)], "sum_e2": [0.5] * 8})
    writer.append("events", {"step": [step], "kind": ["x"]}, rank=1)
    print(step, flush=True)
    step += 1
    time.sleep(0.002)
"""


@pytest.mark.parametrize("acknowledged", [1, 40])
def test_kill_9_loses_nothing_that_append_returned_for(tmp_path: Path, acknowledged: int) -> None:
    directory = tmp_path / "run.mxprobe"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout as lines:
        last = -1
        while last < acknowledged:
            last = int(lines.readline())
        os.kill(writer.pid, signal.SIGKILL)
        last = max([last, *(int(line) for line in lines if line.endswith("\n"))])
    writer.wait()
    for finish in (False, True):
        if finish:
            compact(directory)
        trace = open_trace(directory)
        counts = trace.tensors().groupby("step").size()
        assert set(counts) == {8}
        assert list(counts.index) == list(range(len(counts)))
        assert len(counts) in (last + 1, last + 2)  # one more may have been written and not said so
        assert len(trace.events()) >= last + 1
        assert any("writer died" in problem for problem in trace.problems)


def test_a_reader_beside_a_writer_sees_whole_batches(tmp_path: Path) -> None:
    directory = tmp_path / "run.mxprobe"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        writer.stdout.readline()
        for _ in range(10):
            for _ in range(5):
                last = int(writer.stdout.readline())
            trace = open_trace(directory)
            counts = trace.tensors().groupby("step").size()
            assert set(counts) == {8}
            assert len(counts) > last
            assert trace.problems == [f"The trace is still being written, by process {writer.pid}."]
    finally:
        writer.kill()
        writer.communicate()


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
