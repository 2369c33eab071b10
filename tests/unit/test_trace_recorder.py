"""What the controllers of several ranks write: a rank that the others outlive is told of as lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mxprobe.attach import trace_recorder
from mxprobe.attach.trace_recorder import RunTrace, TraceRecorder
from mxprobe.trace import open_trace


def batch(step: int) -> dict[str, object]:
    columns = {"step": [step], "time_ns": [time.time_ns()], "kind": ["attached"], "detail": ["trainer"]}
    return {"table": "events", "columns": columns}


@pytest.mark.parametrize("outlived", [True, False])
def test_a_rank_that_ends_while_others_go_on_is_lost(outlived: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace_recorder, "OUTLIVED_S", 0.0 if outlived else 3600.0)
    trace = RunTrace(tmp_path / "run.mxprobe", [11, 12], {})
    ranks = [TraceRecorder(trace, pid) for pid in (11, 12)]
    for number, each in enumerate(ranks):
        each.claim_rank(number)
        each.open()
        each.write(batch(4 + number))
    ranks[1].end("target_exited")
    ranks[0].write(batch(7))
    ranks[0].end("target_exited")
    events = open_trace(tmp_path / "run.mxprobe").events()
    lost = events[events["kind"] == "rank_lost"]
    assert len(lost) == (1 if outlived else 0)
    if outlived:
        assert (int(lost["rank"].iloc[0]), int(lost["step"].iloc[0])) == (1, 5)
        assert "process 12, ended while others went on" in str(lost["detail"].iloc[0])
