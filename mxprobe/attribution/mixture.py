"""Mixtures of experts: how the experts of a layer differ, which stand out, and what routing does to the mismatch.

    an expert stands out in a measure when it is above q75 + 3 (q75 - q25) of its layer and above twice the median

Quantiles are those of single steps, averaged; the expert's own value is of its sums over the steps in which it was
among the worst. Flips between generation and training are associated with the mismatch, not its proven cause: a token
whose error is large is also one whose router is near a tie, and an earlier flip acts on later tokens through attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from mxprobe.events import EXPERTS
from mxprobe.schema import Row
from mxprobe.tables import SPREAD_QUANTILES
from mxprobe.trace import Trace
from mxprobe.trace.chunks import chunks
from mxprobe.trace.event_facts import events_of

from .token_mismatch import of_one_source

Place = tuple[str, str, str, int, str]
"""Module, role, phase, rank, measure."""

OUTPUT_ERROR, ZEROED = "output_error", "zeroed"
FAR_OUT = 3.0
TIMES_MEDIAN = 2.0
_OPERAND = ("module", "role", "phase", "rank")
"""Of one rank: under expert parallelism each holds experts of its own."""
_COUNTED = ("n_steps", "n_experts", "n_called", "n_measured", "n_one_token")
_QUANTILES = tuple(f"q{percent}" for percent in SPREAD_QUANTILES)
_EXPERT_SUMS = ("rows", "n", "n_zeroed", "out_ref2", "out_e2")
_ROUTING_SUMS = (
    *("n_tokens", "sum_margin", "sum_logit2", "sum_error2", "sum_ran_error2", "sum_chance"),
    *("n_predicted", "n_observed"),
)
_FLIP_SUMS = ("n_tokens", "n_flipped", "n_slots")


class Standout(NamedTuple):
    module: str
    """The parameter that holds the experts."""
    role: str
    phase: str
    rank: int
    expert: int
    """Its number in the whole model."""
    measure: str
    """`output_error` or `zeroed`."""
    value: float
    median: float
    """Of the layer's experts."""


class FlippedShare(NamedTuple):
    """Of the sampled tokens whose log-probabilities are known on both sides."""

    tokens_frac: float
    mismatch_frac: float
    """Of the sum of squared log-probability differences."""
    n_tokens: int


@dataclass(frozen=True)
class Mixture:
    """What a trace holds of experts and routers; all empty where it holds none."""

    spread: Mapping[Place, Row]
    """By module, role, phase, rank and measure: mean quantiles, and mean numbers of experts."""
    experts: Sequence[Row]
    """By module, role, phase, rank and expert: sums over the steps in which it was among the worst."""
    routing: Sequence[Row]
    """By router and phase: sums over steps; `by_logits`."""
    flips: Mapping[str, Row]
    """By router: sums over steps."""
    flipped: FlippedShare | None
    told: tuple[str, ...]
    """Events of experts that compute something else than their layer."""

    @classmethod
    def of(cls, trace: Trace) -> Mixture:
        """Read piece by piece: the tables of a long run do not fit into memory."""
        spread = _added(trace, "expert_spread", (*_OPERAND, "measure"), (*_COUNTED, *_QUANTILES))
        flips = _added(trace, "routing_flips", ("module",), _FLIP_SUMS)
        return cls(
            spread={
                (*_operand(row), str(row["measure"])): {
                    name: row[name] / row["n_steps"] for name in (*_COUNTED, *_QUANTILES)
                }
                for row in spread
            },
            experts=_added(trace, "experts", (*_OPERAND, "expert"), _EXPERT_SUMS),
            routing=_added(trace, "routing", ("module", "phase", "by_logits"), _ROUTING_SUMS),
            flips={str(row["module"]): row for row in flips},
            flipped=flipped_share(trace.rollouts()),
            told=tuple(event.words for _, event in events_of(trace.events(), EXPERTS)),
        )

    def layers(self) -> dict[tuple[str, str], dict[tuple[str, str], Row]]:
        """Return, by module and phase, by role and measure, the mean over ranks of `spread`."""
        rows: dict[tuple[str, str], dict[tuple[str, str], list[Row]]] = {}
        for (module, role, phase, _, measure), row in self.spread.items():
            rows.setdefault((module, phase), {}).setdefault((role, measure), []).append(row)
        return {
            layer: {place: {name: _mean([row[name] for row in of]) for name in of[0]} for place, of in found.items()}
            for layer, found in rows.items()
        }

    @property
    def is_empty(self) -> bool:
        return not self.spread and not self.routing

    def standouts(self) -> list[Standout]:
        """Return the experts that are far worse than their layer's, the farthest first."""
        found: list[Standout] = []
        for row in self.experts:
            values = {OUTPUT_ERROR: _ratio(row["out_e2"], row["out_ref2"]), ZEROED: _ratio(row["n_zeroed"], row["n"])}
            for measure, value in values.items():
                place = _operand(row)
                layer = self.spread.get((*place, measure))
                if layer is None:
                    continue
                bound = layer["q75"] + FAR_OUT * (layer["q75"] - layer["q25"])
                if value > max(bound, TIMES_MEDIAN * layer["q50"]):
                    found.append(Standout(*place, int(row["expert"]), measure, value, layer["q50"]))
        return sorted(found, key=lambda each: -_ratio(each.value, max(each.median, 1e-300)))


def _operand(row: Row) -> tuple[str, str, str, int]:
    return str(row["module"]), str(row["role"]), str(row["phase"]), int(row["rank"])


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 0.0


def flipped_share(rollouts: pd.DataFrame) -> FlippedShare | None:
    """Return it from table `rollouts`; None where generation and training were not compared router by router."""
    rows = of_one_source(rollouts.assign(stratum=rollouts["stratum"].astype(str)))
    sums = rows.groupby("stratum")[["n_tokens", "sum_d2"]].sum().to_dict("index")
    nothing = {"n_tokens": 0.0, "sum_d2": 0.0}
    same, flipped = (sums.get(name, nothing) for name in ("routing_same", "routing_flipped"))
    n, d2 = (float(same[name]) + float(flipped[name]) for name in nothing)
    if n == 0:
        return None
    return FlippedShare(float(flipped["n_tokens"]) / n, _ratio(float(flipped["sum_d2"]), d2), int(n))


def _added(trace: Trace, table: str, names: Sequence[str], sums: Sequence[str]) -> list[Row]:
    """Return one row per name, over steps and ranks; a sum that is missing throughout is NaN."""
    parts = [_sums(piece, names, sums) for piece in chunks(trace.directory, table, (*names, *sums))]
    if not parts:
        return []
    together = pd.concat(parts, ignore_index=True)
    added = together.groupby(list(names), sort=False)[list(sums)].sum(min_count=1).reset_index()
    return [{str(name): value for name, value in row.items()} for row in added.to_dict("records")]


def _sums(piece: Any, names: Sequence[str], sums: Sequence[str]) -> pd.DataFrame:
    frame = piece.select([*names, *sums]).to_pandas()
    typed = {name: frame[name].astype(object) for name in names} | {name: frame[name].astype(float) for name in sums}
    return pd.DataFrame(typed).groupby(list(names), sort=False)[list(sums)].sum(min_count=1).reset_index()
