"""Ranks that are missing, behind or slow are named; processes that only log are no ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mxprobe.cli.status import where_ranks_stand
from mxprobe_reports import Report, ranks
from tests import report_frames


def overhead(last_steps: dict[int, int], slow: dict[int, float] | None = None) -> pd.DataFrame:
    rows = [
        pd.DataFrame({"step": np.arange(1, last + 1), "rank": rank, "step_ns": int(1e9 * (slow or {}).get(rank, 1.0))})
        for rank, last in last_steps.items()
    ]
    return pd.concat(rows, ignore_index=True).assign(probed=False, probe_ns=0, n_dropped=0, n_errors=0, n_steps=1)


def said(overhead: pd.DataFrame, tensors_of: tuple[int, ...], roles: dict[int, str] | None = None) -> list[str]:
    tensors = report_frames.tables(1, 20, 10)["tensors"]
    tensors = pd.concat([tensors.assign(rank=rank) for rank in tensors_of], ignore_index=True)
    run = {"ranks": [{"rank": rank, "role": role} for rank, role in (roles or {}).items()]}
    inputs = report_frames.inputs(1, tensors=tensors, overhead=overhead)
    inputs = type(inputs)(**{**vars(inputs), "run": run})
    return ranks.sentences(inputs, Report.of(inputs).operands)


def test_ranks_that_did_alike_say_nothing() -> None:
    assert said(overhead({0: 100, 1: 101}), (0, 1)) == []


def test_a_rank_without_operands_is_named_unless_it_only_logs() -> None:
    assert "measured on rank 2" in said(overhead({0: 9, 1: 9, 2: 9}), (0, 1))[0]
    roles = {0: "trainer", 1: "trainer", 2: "metrics"}
    assert said(overhead({0: 9, 1: 9, 2: 9}), (0, 1), roles) == []


def test_a_rank_that_is_behind_or_slow_is_named() -> None:
    (behind,) = said(overhead({0: 100, 1: 60, 2: 100}), (0, 1, 2))
    assert behind.startswith("Rank 1 was last seen at step 60, others at 100")
    (slow,) = said(overhead({0: 100, 1: 100, 2: 100}, {1: 1.5}), (0, 1, 2))
    assert slow.startswith("Rank 1 takes 1.5 times as long per step as the median rank")


def test_a_rank_whose_last_steps_were_added_up_is_not_behind() -> None:
    rows = overhead({0: 100, 1: 100})
    rows = rows[(rows["rank"] == 0) | (rows["step"] <= 80)]
    rows = rows.assign(last_step=rows["step"].where((rows["rank"] == 0) | (rows["step"] < 80), 100))
    assert said(rows, (0, 1)) == []
    (behind,) = said(rows.assign(last_step=rows["last_step"].clip(upper=100 - 10 * rows["rank"])), (0, 1))
    assert behind.startswith("Rank 1 was last seen at step 90, others at 100")


def test_status_says_where_the_ranks_of_a_trace_stand() -> None:
    def answer(rank: int, step: int | None, role: str = "trainer", directory: str = "/a") -> dict[str, object]:
        return {"rank": rank, "last_step": step, "role": role, "directory": directory}

    assert where_ranks_stand([answer(0, 9), answer(1, 9), answer(2, 3, "metrics"), answer(3, None)]) == []
    ranks_of_a = [answer(0, 9), answer(1, 7), answer(2, 7), answer(0, 5, directory="/b")]
    assert where_ranks_stand(ranks_of_a) == ["ranks of /a are at steps 7 (rank 1, 2) to 9"]
