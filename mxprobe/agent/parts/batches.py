"""Listens where a framework has both sides' log-probabilities of its training batch: rows of table `rollouts`.

Most RL trainers hold them, whatever engine generates and wherever it runs. `taps.batches` says where. Nothing is
waited for: tensors are copied on their device, in probed steps only, and read by the worker.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable

import torch

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.taps.batches import BATCH_TAPS, copied
from mxprobe.agent.taps.splices import Splices, wrapped
from mxprobe.agent.taps.table import Tap
from mxprobe.events import LOGPROBS, Event, Tell
from mxprobe.measuring.tokens.batch import Batch, BatchMeasurement

MAX_SEQUENCES = 256
"""Of one call; the others are left out."""
MAX_CALLS = 16
"""Of one step: microbatches."""


class BatchTaps:
    """`ensure_wrapped` and `arm` before a step, `finish` after it, `unwrap` at the end; nothing raises.

    on_batch(batch): called in every armed call, before the framework's own function runs.
    """

    def __init__(
        self,
        clock: Clock,
        guard: Guard,
        tell: Tell,
        on_batch: Callable[[Batch], None],
        taps: tuple[Tap, ...] = BATCH_TAPS,
    ) -> None:
        self.armed = False
        self._clock = clock
        self._guard = guard
        self._tell_event = tell
        self._on_batch = on_batch
        self._splices = Splices(
            taps,
            self._listen,
            on_wrapped=lambda tap: self.tell(wrapped(tap, "training batch")),
            on_refused=self.tell,
            on_error=guard.swallow,
        )
        self._pid = os.getpid()
        self._told: list[Event] = []
        self._batches: dict[str, list[Batch]] = {}

    def ensure_wrapped(self) -> None:
        """Tap what has been imported by now; cheap enough for every step, and never waits."""
        self._splices.ensure_wrapped()

    def unwrap(self) -> None:
        """Give every function back."""
        self.armed = False
        for event in self._splices.give_back():
            self.tell(event)

    def arm(self) -> None:
        self._batches.clear()
        self.armed = not self._splices.closed

    def finish(self, computed_in: torch.dtype | None) -> BatchMeasurement | None:
        """What the step that is over has given; None if nothing. Of several sources, the one with most calls.

        computed_in: the dtype of the model's last hidden states, which its log-probabilities have passed through.
        """
        self.armed = False
        batches, self._batches = self._batches, {}
        if not batches:
            return None
        source = max(batches, key=lambda name: len(batches[name]))
        return BatchMeasurement(source, batches[source], self._clock.step, computed_in)

    def _listen(self, tap: Tap, arguments: dict[str, Any]) -> bool:
        """Always False: sinks that the function calls in turn are to be heard."""
        if not self.armed or os.getpid() != self._pid or torch.compiler.is_compiling():
            return False
        started = time.perf_counter_ns()
        try:
            self._take(tap, tap.read(arguments))
        except Exception as error:
            self._guard.swallow(tap.source, error)
        self._clock.hook_ns += time.perf_counter_ns() - started
        return False

    def _take(self, tap: Tap, batch: Batch) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation
        self._on_batch(batch)
        held = self._batches.get(tap.source, [])
        if batch.rollout is None or batch.train is None:
            missing = "rollout's" if batch.rollout is None else "trainer's"
            self._cannot(tap, "no_log_probs", f"the batch does not hold the {missing} log-probabilities")
        elif not batch.mask:
            self._cannot(tap, "no_mask", "the batch does not say which of its tokens count")
        elif len(held) < MAX_CALLS:
            kept = Batch(*(copied(value, MAX_SEQUENCES) for value in batch[:5]), version_now=batch.version_now)
            self._batches.setdefault(tap.source, []).append(kept)

    def _cannot(self, tap: Tap, state: str, why: str) -> None:
        self.tell(Event(LOGPROBS, tap.source, state, text=f"{tap.source}: {why}"))

    def tell(self, event: Event) -> None:
        """Tell of an event once."""
        if event not in self._told:
            self._told.append(event)
            self._tell_event(event)
