"""What the ranks of a run have not in common: ranks that are missing, behind the others, or slower, in sentences."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .inputs import Inputs
from .operands import Operands

BEHIND_STEPS = 2
"""Ranks that are detached together end within so many steps of each other."""
SLOW = 1.2
"""Median step time over that of the median rank. Ranks that wait for each other in every step do not differ."""
_LISTED = 8


def sentences(inputs: Inputs, operands: Operands) -> list[str]:
    """Return sentences; none for a run of one rank, and where all ranks did alike."""
    left_out = metric_ranks(inputs.run)
    found = [*_missing(inputs, operands, left_out)]
    if "rank" in inputs.overhead:
        found += _skew(inputs.overhead[~inputs.overhead["rank"].isin(sorted(left_out))])
    return found


def metric_ranks(run: Mapping[str, Any]) -> frozenset[int]:
    """Return the partitions of processes that were attached for the metrics they log alone."""
    ranks: Any = run.get("ranks")
    entries = [each for each in ranks if isinstance(each, dict)] if isinstance(ranks, list) else []
    return frozenset(int(each["rank"]) for each in entries if each.get("role") == "metrics" and "rank" in each)


def _missing(inputs: Inputs, operands: Operands, left_out: frozenset[int]) -> list[str]:
    """Name ranks that ran but measured no operand, and ranks that the page has no room for."""
    if not operands.n_rows:
        return []
    frames = (inputs.overhead, inputs.modules, inputs.signals)
    ran = {int(rank) for frame in frames if "rank" in frame for rank in frame["rank"].dropna().unique()}
    measured = set(operands.ranks_measured)
    gaps = sorted((set(range(max(ran | measured) + 1)) | ran) - measured - left_out)
    found: list[str] = []
    if gaps:
        found.append(
            f"No operand was measured on rank {_listed(gaps)}: what is shown is of the other {len(measured)}. The rank "
            "was not attached, or its files are missing."
        )
    if len(operands.ranks) not in (0, len(measured)):
        found.append(f"The page holds the first {len(operands.ranks)} of {len(measured)} ranks one by one; all count.")
    return found


def _skew(overhead: pd.DataFrame) -> list[str]:
    rows = overhead[pd.to_numeric(overhead["step_ns"]).fillna(0) > 0]
    if rows["rank"].nunique() < 2:
        return []
    found: list[str] = []
    ends = rows["step"] if "last_step" not in rows else pd.to_numeric(rows["last_step"]).fillna(rows["step"])
    last = ends.groupby(rows["rank"]).max()  # a row of added steps begins at `step`
    behind = last[last < last.max() - BEHIND_STEPS]
    if len(behind):
        found.append(
            f"Rank {_listed(behind.index.tolist())} was last seen at step {int(behind.min())}, others at "
            f"{int(last.max())}: it was lost, was detached earlier, or is that far behind."
        )
    n_steps = rows.get("n_steps", 1)
    per_step = (pd.to_numeric(rows["step_ns"]) / n_steps).groupby(rows["rank"]).median()
    ratio = per_step / float(np.median(per_step))
    slow = ratio[ratio > SLOW]
    if len(slow):
        found.append(
            f"Rank {_listed(slow.index.tolist())} takes {slow.max():.2g} times as long per step as the median rank: "
            "its share of the work is larger, or its device is slower."
        )
    return found


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_LISTED])) + (" and more" if len(ranks) > _LISTED else "")
