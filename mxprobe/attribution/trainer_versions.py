"""The trainer's weights by version, out of table `weight_codes`: what an engine's rows are set against.

Fused experts stand in one row of the table for all experts of a layer, row o of expert e as feature e O + o. Where the
trace does not tell how they are stored, there is a row for every `reading`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mxprobe.schema import Phase

_EXPERT = re.compile(r"(?P<above>.+)\.(?P<number>\d+)\.(?P<part>[^.]+)")


@dataclass(frozen=True)
class Version:
    """Some rows of one weight as of a step, in one form."""

    step: int
    time_ns: int
    form: str
    reading: str
    """"" where it is known how the weight is stored."""
    shape: tuple[int, int]
    features: Any
    """int64 [n], ascending"""
    hashes: Any
    """int64 [n]"""

    def agrees(self, held: dict[int, int]) -> float | None:
        """Return the share of the rows in common with feature -> hash that are alike; None where there are none."""
        rows = zip(self.features.tolist(), self.hashes.tolist(), strict=True)
        alike = [held[feature] == digest for feature, digest in rows if feature in held]
        return sum(alike) / len(alike) if alike else None


class Versions:
    """Of every weight of a trainer."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._rows: dict[str, list[dict[Any, Any]]] = {}
        trained = rows[rows["phase"].astype(str) == Phase.TRAIN.value].sort_values("step", ascending=False)
        for row in trained.to_dict("records"):
            row["features"], row["hashes"] = np.asarray(row["features"]), np.asarray(row["hashes"])
            self._rows.setdefault(str(row["module"]), []).append(row)
        self._times = trained.groupby("step")["time_ns"].min().sort_index()

    @property
    def has_gaps(self) -> bool:
        """Whether the trainer has made steps of which no version was kept, between the first and the last."""
        steps = self._times.index
        return len(steps) > 0 and int(steps[-1]) - int(steps[0]) >= len(steps)

    def n_before(self, time_ns: int) -> int:
        """Return how many versions were kept without a gap up to that time; 0 where the next one was not.

        So many lags are told one by one.
        """
        steps = self._times.index.to_numpy()
        place = int(self._times.searchsorted(time_ns, side="right"))
        if not 0 < place < len(steps) or steps[place] != steps[place - 1] + 1:
            return 0
        gaps = np.flatnonzero(np.diff(steps[:place]) != 1)
        return place - (int(gaps[-1]) + 1 if len(gaps) else 0)

    def of(self, module: str) -> list[Version]:
        """Return the versions of a module, the newest first; empty where the trace has none."""
        expert = _EXPERT.fullmatch(module)
        if module in self._rows or expert is None:
            return list(self._read(module, 0))
        return list(self._read(f"{expert['above']}.{expert['part']}", int(expert["number"])))

    def _read(self, name: str, expert: int) -> Iterator[Version]:
        for row in self._rows.get(name, ()):
            n_out, n_in = map(int, row["shape"][-2:])
            features = row["features"]
            start, end = np.searchsorted(features, (expert * n_out, (expert + 1) * n_out))
            if start < end:
                yield Version(
                    step=int(row["step"]),
                    time_ns=int(row["time_ns"]),
                    form=str(row["form"]),
                    reading=str(row["layout"]),
                    shape=(n_out, n_in),
                    features=features[start:end] - expert * n_out,
                    hashes=row["hashes"][start:end],
                )
