"""What may be added: the parts that ranks hold of one operand, once each, and no rows of different layers.

    energies and counts   once per part of the operand            "tokens=r0 in=1/2"
    output sums           once per part of the GEMM's product     "tokens=r0 in=1/2 | out=0/2"

A part is the text of column `placement` (`mxprobe.measuring.adapters.placement`), and of ranks that hold the same one
the lowest counts: W is on every data-parallel rank, X on every tensor-parallel one. A row whose text is empty says
nothing and is never another's copy. Rows of traces without the column, and of one rank, are as they are. Over a
contraction that is sharded the product of each rank is a partial sum: energies add up to those of the
whole, output sums to those of the parts.

Names are those of the whole model, and different layers of one name are kept apart: `mxprobe.trace.name_conflicts`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from mxprobe.schema import COUNTS, ENERGY_SUMS
from mxprobe.tables import OUTPUT_SUMS
from mxprobe.trace import Trace
from mxprobe.trace.aggregation import Aggregation

PLACED = ("step", "micro_step", "module", "role", "phase", "placement", "rank")
"""Columns that `distinct` needs."""
_OF_OPERAND = frozenset((*COUNTS, *ENERGY_SUMS, "n_edge_blocks"))
_OF_PRODUCT = frozenset(OUTPUT_SUMS)
_PARTNER = " | "
_NAMES = ("module", "role", "phase")


def distinct(frame: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return the rows of `tensors`, `whatif` or `blocks` with 0 for what another rank's row has counted already.

    Unchanged where that cannot be told (a column of `PLACED` missing), and where ranks are not added (`by` has `rank`).
    """
    if "rank" in by or not set(PLACED) <= set(frame.columns) or frame["rank"].nunique() < 2:
        return frame
    placement = _texts(frame)
    says = placement != ""
    if not says.any():
        return frame
    keys = [name for name in (*PLACED[:5], "correction", "format", "rule") if name in frame.columns]
    result = frame.copy()
    for part, columns in _parts(placement):
        lowest = frame.assign(part=part).groupby([*keys, "part"], observed=True)["rank"].transform("min")
        _count_once(result, ((frame["rank"] > lowest) & says).to_numpy(), columns)
    return result


class Copies:
    """Which rank counts for each part, for tables that are not read whole."""

    def __init__(self, names: tuple[str, ...], lowest: tuple[dict[tuple[str, ...], int], ...]) -> None:
        self._names = names
        self.keys = (*names, "placement")
        """Columns that `removed` needs, beside `rank`."""
        self._lowest = lowest

    @classmethod
    def of(cls, trace: Trace, table: str) -> "Copies | None":
        """Return None where the table is of one rank, or says nothing of parts."""
        lowest: tuple[dict[tuple[str, ...], int], ...] = ({}, {})
        names = (*_NAMES, "correction") if table == "whatif" else _NAMES
        frame = trace.sums(Aggregation(table, (*names, "placement", "rank")))
        if frame["rank"].nunique() < 2 or not _texts(frame).str.len().any():
            return None
        for found, (part, _) in zip(lowest, _parts(_texts(frame)), strict=True):
            for key, rank in zip(_part_keys(frame, names, part), frame["rank"], strict=True):
                found[key] = min(found.get(key, int(rank)), int(rank))
        return cls(names, lowest)

    def removed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the piece with 0 for what is another rank's to count, without `rank`."""
        result = frame.drop(columns="rank")
        for lowest, (part, columns) in zip(self._lowest, _parts(_texts(frame)), strict=True):
            least = np.array([lowest[key] for key in _part_keys(frame, self._names, part)])
            repeated = (least < frame["rank"].to_numpy()) & (_texts(frame) != "").to_numpy()
            _count_once(result, repeated, columns)
        return result


def _part_keys(frame: pd.DataFrame, names: Sequence[str], part: pd.Series) -> Iterator[tuple[str, ...]]:
    return zip(*(frame[name].astype(str) for name in names), part, strict=True)


def _texts(frame: pd.DataFrame) -> pd.Series:
    return frame["placement"].astype("object").fillna("").astype(str)


def _parts(placement: pd.Series) -> tuple[tuple[pd.Series, frozenset[str]], ...]:
    """Return (text of the part, columns that are counted once for it): of the operand, and of the product."""
    return (placement.str.partition(_PARTNER)[0], _OF_OPERAND), (placement, _OF_PRODUCT)


def _count_once(frame: pd.DataFrame, repeated: npt.NDArray[np.bool_], columns: frozenset[str]) -> None:
    for name in columns & set(frame.columns):
        frame[name] = frame[name].mask(repeated, 0)
