"""Listens where a framework has both sides' log-probabilities of its training batch: rows of table `rollouts`.

Most RL trainers hold them, whatever engine generates and wherever it runs. `taps.batch_readers` says where. Nothing is
waited for: tensors are copied on their device, in probed steps only, and read by the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.agent.taps.batch_readers import BATCH_TAPS, copied
from mxprobe.agent.taps.splicing import Splices, wrapped
from mxprobe.agent.taps.tap_table import Tap
from mxprobe.events import LOGPROBS, Event
from mxprobe.measuring.tokens.training_batch import Batch, BatchMeasurement

MAX_SEQUENCES = 256
"""Of one call; the others are left out."""
MAX_CALLS = 16
"""Of one step: microbatches."""


class BatchTaps(Part):
    """on_batch(batch) is called in every call of a watched step, before the framework's own function runs."""

    name = "training batches"
    roles = (TRAINER,)

    def __init__(
        self,
        context: Context,
        on_batch: Callable[[Batch], None],
        computed_in: Callable[[], torch.dtype | None],
        taps: tuple[Tap, ...] = BATCH_TAPS,
    ) -> None:
        """`computed_in`: dtype of the model's last hidden states, which its log-probabilities have passed through."""
        self.armed = False
        self._context = context
        self._on_batch = on_batch
        self._computed_in = computed_in
        self._tell = context.events.tell_once
        self._splices = Splices(
            taps,
            self._listen,
            on_wrapped=lambda tap: self._tell(wrapped(tap, "training batch")),
            on_refused=self._tell,
            on_error=context.guard.swallow,
        )
        self._batches: dict[str, list[Batch]] = {}

    def watch(self, roots: Sequence[nn.Module]) -> None:
        self._splices.ensure_wrapped()

    def remove(self) -> None:
        self.armed = False
        for event in self._splices.give_back():
            self._tell(event)

    def begin(self) -> None:
        if self._context.clock.is_watched:
            self._splices.ensure_wrapped()
            self._batches.clear()
            self.armed = not self._splices.closed

    def finish(self) -> Iterable[Job]:
        measured = self.collect()
        if measured is None:
            return ()
        return [Job(lambda: measured.rows(self._tell), measured.device, [measured.ready], measured)]

    def collect(self) -> BatchMeasurement | None:
        """Return what the step that is over has given, if anything. Of several sources, the one with most calls."""
        self.armed = False
        batches, self._batches = self._batches, {}
        if not batches:
            return None
        source = max(batches, key=lambda name: len(batches[name]))
        return BatchMeasurement(source, batches[source], self._context.clock.step, self._computed_in())

    def _listen(self, tap: Tap, arguments: dict[str, Any]) -> bool:
        """Read a call; False, because sinks that the function calls in turn are to be heard."""
        self._context.guard.hook(tap.source, self._take, when=lambda: self.armed)(tap, arguments)
        return False

    def _take(self, tap: Tap, arguments: dict[str, Any]) -> None:
        batch: Batch = tap.read(arguments)
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
        self._tell(Event(LOGPROBS, tap.source, state, text=f"{tap.source}: {why}"))
