"""A trace in which `step` counts the tokens that the run had seen: for runs whose steps are of different size."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from mxprobe.errors import UsageError
from mxprobe.trace import Trace
from mxprobe.trace.aggregation import Aggregation, combined, framed, partial
from mxprobe.trace.arrow import columns_of

METRIC = "tokens_seen"


class TokenTrace(Trace):
    """The rows of a trace between the first and the last step at which the framework logged its count of tokens.

    Steps in between are interpolated. Frames, chunks and columns are otherwise those of the trace.

    Raises:
        UsageError: the run logged no such count, or not at two steps.
    """

    axis = "tokens"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.directory)
        rows = trace.signals()
        rows = rows[(rows["metric"].astype(str) == METRIC) & np.isfinite(rows["value"].to_numpy(dtype=float))]
        seen = rows.groupby("step")["value"].max().cummax()
        if seen.nunique() < 2:
            raise UsageError(
                f"{trace.directory} cannot be laid out by tokens: its count of tokens was logged at {len(seen)} steps",
                cause="the trainer logs no num_tokens or num_input_tokens_seen, or the attach was short",
                remedy="compare by step, or switch the count on (Hugging Face: include_num_input_tokens_seen)",
            )
        self._steps, self._tokens = seen.index.to_numpy(dtype=float), seen.to_numpy(dtype=float)

    def arrow(self, name: str, columns: Collection[str] | None = None) -> Any:
        if "step" not in columns_of(name):
            return super().arrow(name, columns)
        return self._by_tokens(super().arrow(name, None if columns is None else {*columns, "step"}), columns)

    def chunks(self, name: str, columns: Collection[str]) -> Iterator[Any]:
        if "step" not in columns_of(name):
            yield from super().chunks(name, columns)
            return
        for piece in super().chunks(name, {*columns, "step"}):
            mapped = self._by_tokens(piece, columns)
            if mapped.num_rows:
                yield mapped

    def sums(self, aggregation: Aggregation) -> pd.DataFrame:
        rows = self.chunks(aggregation.table, aggregation.columns)
        return framed(combined((partial(piece, aggregation) for piece in rows), aggregation), aggregation)

    def _by_tokens(self, data: Any, columns: Collection[str] | None) -> Any:
        step = data.column("step").to_numpy()
        inside = (step >= self._steps[0]) & (step <= self._steps[-1])
        tokens = np.rint(np.interp(step[inside], self._steps, self._tokens)).astype(np.int64)
        kept = data.filter(pa.array(inside))
        kept = kept.set_column(kept.schema.get_field_index("step"), "step", pa.array(tokens))
        return kept if columns is None or "step" in columns else kept.drop_columns(["step"])
