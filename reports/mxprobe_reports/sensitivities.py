"""How sensitive the policy is to each operand's error: Delta2 of the replays, as the KL that it predicts."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from mxprobe.attribution.sensitivity_ranks import MIN_MICROBATCHES, is_valid, operand_sensitivity, validity
from mxprobe.trace.column_arrays import Array

from .operands import Operands


@dataclass(frozen=True)
class Sensitivities:
    """(n_operands,) arrays in the order of `Operands.totals`, NaN where an operand was not replayed."""

    predicted_kl: Array
    """Nats per token, to first order, this operand's error alone."""
    rank_low: Array
    """Ends of the interval of its rank, 1 for the largest."""
    rank_high: Array
    n_microbatches: int
    holds: bool | None
    """Whether replays confirm that first order holds; None where no replay was made."""

    @classmethod
    def of(cls, sensitivity: pd.DataFrame, replays: pd.DataFrame, operands: Operands) -> "Sensitivities | None":
        """Read the replays. None where no operand on the page was measured."""
        if sensitivity.empty or not len(operands.totals):
            return None
        found = operand_sensitivity(sensitivity)
        place = operands.index()
        at = np.array([place.get((str(m), str(r)), -1) for m, r in zip(found["module"], found["role"], strict=True)])
        known = found[at >= 0]
        if known.empty or not np.isfinite(known["predicted_kl"].to_numpy(dtype=float)).any():
            return None
        columns = {name: np.full(len(operands.totals), np.nan) for name in _COLUMNS}
        for name, values in columns.items():
            values[at[at >= 0]] = known[name].to_numpy(dtype=float)
        checked = validity(sensitivity, replays)
        holds = is_valid(checked) if len(checked) else None
        return cls(**columns, n_microbatches=int(known["n_microbatches"].max()), holds=holds)

    def sentence(self) -> str:
        """Say what the numbers rest on."""
        what = (
            "Predicted KL, nats per token, of each forward operand's error alone: to first order, from "
            f"{self.n_microbatches} replayed microbatch{'' if self.n_microbatches == 1 else 'es'}."
        )
        if self.n_microbatches < MIN_MICROBATCHES:
            what += f" Under {MIN_MICROBATCHES}, the verdict does not weigh by it."
        return f"{what} {_HOLDS[self.holds]}"


_COLUMNS = ("predicted_kl", "rank_low", "rank_high")
_HOLDS = {
    True: "Replays confirm that first order holds.",
    False: "Replays do not confirm that first order holds, so read the order of operands, not the size.",
    None: "No replay says whether first order holds (attach with --replay-every).",
}
