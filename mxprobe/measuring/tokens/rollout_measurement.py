"""A generation and the training forwards of its tokens, as rows of `rollouts`, `routing_flips`, `layers`, `signals`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mxprobe.events import LOGPROBS, Event, Tell
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.measuring.replay.residual_stream import LayerDifference, layer_rows
from mxprobe.measuring.tokens.generation import Generation
from mxprobe.measuring.tokens.logprobs import Scored, compute_dtype, counted_tokens, pair_up
from mxprobe.measuring.tokens.mismatch import table_rows
from mxprobe.measuring.tokens.routing_flips import Flips
from mxprobe.schema import TableRow

SOURCE = "mxprobe"
GENERATION = "generation"
"""`source` of rows that come from a generation in this process."""


class Measurement:
    """A generation and its training forwards; `rows` waits for the device and belongs to the worker."""

    def __init__(
        self,
        generation: Generation,
        scored: Sequence[Scored],
        step: int,
        streams: Sequence[LayerDifference] = (),
        flips: Flips | None = None,
    ) -> None:
        self.device = generation.prompt.device
        self.ready = event_now(self.device)
        self._generation = generation
        self._scored = scored
        self._streams = list(streams)
        self._flips = flips
        self._step = step
        self._time_ns = time.time_ns()

    def rows(self, tell: Tell) -> list[TableRow]:
        generation, when = self._generation, {"step": self._step, "time_ns": self._time_ns}
        if generation.unaltered is not None and not bool(generation.unaltered):
            tell(not_measured("the model returns other logits than its lm_head's (soft cap, scale)"))
            return []
        found = [row for row in layer_rows(self._streams) if row["median_frac"] == row["median_frac"]]
        layers = [("layers", {**when, "micro_step": 0, **row}) for row in found]  # without those of no token
        return [*layers, *self._flip_rows(generation, when), *self._token_rows(generation, when, tell)]

    def _flip_rows(self, generation: Generation, when: dict[str, int]) -> list[TableRow]:
        if self._flips is None:
            return []
        counted = counted_tokens(generation, self._flips.found)
        return [("routing_flips", {**when, **row}) for row in self._flips.rows(counted)]

    def _token_rows(self, generation: Generation, when: dict[str, int], tell: Tell) -> list[TableRow]:
        pairs = pair_up(generation, self._scored, None if self._flips is None else self._flips.anywhere)
        if not len(pairs.log_prob_rollout):
            tell(not_measured("none of the generated sequences was in a training batch of the same step"))
            return []
        temperature = generation.sampling.temperature
        words = f"measured at temperature {temperature:g}, as read from the running generate()"
        tell(Event(LOGPROBS, GENERATION, "measured", {"temperature": temperature}, words))
        dtype = compute_dtype(generation, self._scored)
        drawn = table_rows(pairs, when, GENERATION, signal_source=SOURCE, temperature=temperature, dtype=dtype)
        return list(drawn)


def not_measured(why: str) -> Event:
    """Return the event that a generation's log-probabilities are not measured."""
    return Event(LOGPROBS, GENERATION, "not_measured", text=f"not measured: {why}")
