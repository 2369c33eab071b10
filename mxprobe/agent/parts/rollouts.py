"""Listens to the model's embedding, last norm and lm_head in a probed step: both sides' log-probabilities.

What is needed, and said in an event of kind `logprobs` where it is missing: an embedding and an lm_head of its shape, a
norm before it, transformers' `generate` in this process, logits that are the lm_head's output, and the generated
sequences in a training batch of the same optimizer step, each in a row of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.context import Context
from mxprobe.agent.guard import Hook
from mxprobe.agent.part import TRAINER, Job, Part
from mxprobe.agent.phases import Phases
from mxprobe.agent.probes.routing_probe import RoutingTap
from mxprobe.agent.probes.stream_probe import StreamTap
from mxprobe.measuring.compat import in_backward
from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed
from mxprobe.measuring.operands.weights import effective_weight
from mxprobe.measuring.phase_rules import Forward
from mxprobe.measuring.replay.policy_output import find_policy
from mxprobe.measuring.sampling import seed_of
from mxprobe.measuring.tokens.generation import Generation, sampling_in_progress
from mxprobe.measuring.tokens.lm_head import find_head
from mxprobe.measuring.tokens.logprobs import Scored, score_hidden, score_logits
from mxprobe.measuring.tokens.matching import match
from mxprobe.measuring.tokens.rollout_measurement import Measurement, not_measured
from mxprobe.measuring.tokens.training_batch import Batch
from mxprobe.schema import Phase

MAX_MICRO_BATCHES = 16


class Rollouts(Part):
    name = "log-probabilities"
    roles = (TRAINER,)

    def __init__(self, context: Context, phases: Phases) -> None:
        self.armed = False
        self._context = context
        self._phases = phases
        self._tell = context.events.tell_once
        self._handles: list[Any] = []
        self._lm_head: nn.Linear | None = None
        self._given_up = False
        self._head_is_called = False
        """The training forward calls the lm_head: no need to recompute its output."""
        self._feeds_head = False
        """A generation has shown that the norm's output is what the lm_head gets."""
        self.computed_in: torch.dtype | None = None
        """Dtype of the last hidden states in training, once seen."""
        self._streams = StreamTap()
        self._routing = RoutingTap()
        self.forget()

    def forget(self) -> None:
        """Drop what is held of the step that ended."""
        self._streams.forget()
        self._routing.forget()
        self._prefill: Generation | None = None
        self._prefill_of: Forward | None = None
        """The forward that `_prefill` was made of."""
        self._generation: Generation | None = None
        self._drawn_from: Forward | None = None
        """The forward that `_generation` began with."""
        self._is_drawing = False
        """The forward under way continues `_generation`."""
        self._norm_output: tuple[Any, int] | None = None
        self._train_ids: torch.Tensor | None = None
        self._scored: list[Scored] = []
        self._n_micro = 0
        self._advantages: torch.Tensor | None = None
        """Of the rows that the next training forwards are given, in order."""
        self._advantage: torch.Tensor | None = None
        """[B] of the forward under way."""

    def watch(self, roots: Sequence[nn.Module]) -> None:
        """Listen to the model's head; where it has none that could be listened to, an event says so."""
        head = find_head(roots)
        if isinstance(head, str):
            self._give_up(head)
            return
        self._lm_head = head.lm_head  # not its owner, which may be the whole model
        self._streams.watch(roots, self._guarded)
        self._routing.watch(roots, self._guarded)
        for module, on_call in (
            (head.embedding, self._on_embedding),
            (head.norm, self._on_norm),
            (head.lm_head, self._on_lm_head),
            (head.owner, self._on_owner),
        ):
            self._handles.append(module.register_forward_hook(self._guarded(on_call)))

    def remove(self) -> None:
        handles, self._handles = self._handles, []
        for each in (*handles, self._streams, self._routing):
            self._context.guard.attempt("removing hooks", each.remove)

    def begin(self) -> None:
        if not self._context.clock.is_watched:
            return
        self.forget()
        self.armed = self._lm_head is not None and not self._given_up
        if self.armed:
            self._streams.arm()
            self._routing.arm()

    def note_batch(self, batch: Batch) -> None:
        """A training batch that the next forwards are made of: its advantages, [B] or [B, 1]."""
        advantage = batch.advantage
        self._advantages = None
        if self.armed and is_plain(advantage) and advantage.numel() == advantage.shape[0]:
            with undisturbed(advantage.device.type):
                self._advantages = advantage.detach().reshape(-1).clone()

    def _next_advantages(self, n: int) -> torch.Tensor | None:
        held = self._advantages
        if held is None or len(held) < n:
            return None
        self._advantages = held[n:]
        return held[:n]

    def finish(self) -> Iterable[Job]:
        measured = self.collect()
        if measured is None:
            return ()
        return [Job(lambda: measured.rows(self._tell), measured.device, [measured.ready], measured)]

    def collect(self) -> Measurement | None:
        """Return what the step that is over has given; None if nothing."""
        self._streams.remove()
        self._routing.remove()
        if not self.armed:
            return None
        self.armed = False
        generation, scored, step = self._generation, self._scored, self._context.clock.step
        streams, flips = self._streams.finish(), self._routing.finish()
        self.forget()
        if generation is None or self._given_up:
            return None
        if not scored:
            self._tell(not_measured(self._why_not_scored))
            return None
        return Measurement(generation, scored, step, streams, flips)

    @property
    def _why_not_scored(self) -> str:
        if not (self._feeds_head or self._head_is_called):
            return "training does not call the lm_head, and its input is not the output of the last norm"
        return "no training forward was seen after the generation, in the same step"

    def _guarded(self, on_call: Callable[[Any, Any], None]) -> Hook:
        """Return a hook of `on_call(input, output)`; after a failure nothing more is listened to."""

        def act(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                on_call(args[0] if args else None, output)

        return self._context.guard.hook("log-probabilities", act, when=lambda: self.armed, then=self._fail)

    def _fail(self, error: Exception) -> None:
        self._give_up(f"listening failed ({type(error).__name__})")

    def _on_embedding(self, ids: Any, output: Any) -> None:
        if not is_plain(ids) or ids.dim() != 2 or is_off_limits(ids):
            return
        forward = self._phases.call(self, ids)
        if forward.phase is Phase.TRAIN:
            self._n_micro += 1
            self._is_drawing = False
            self._train_ids = None
            if self._generation is not None and self._n_micro <= MAX_MICRO_BATCHES:
                with undisturbed(ids.device.type):
                    self._train_ids = ids.detach().clone()
                    self._advantage = self._next_advantages(len(ids))
                    found = match(self._generation, ids)
                    self._streams.training(found)
                    self._routing.training(found, (ids.shape[0], ids.shape[1]))
        elif forward.start is forward:
            self._prefill, self._prefill_of = self._begin(ids), forward
            self._is_drawing = False
            if self._generation is None:
                self._streams.prefill(self._prefill)
                self._routing.prefill(self._prefill)
        else:
            self._streams.decode()
            self._on_decode(ids[:, -1:], forward)
            self._routing.decode(self._generation if self._is_drawing else None)

    def _begin(self, ids: torch.Tensor) -> Generation | None:
        """A call without gradient that continues no other: the prefill of a generation, if others continue it."""
        if self._n_micro:
            return None  # after training has begun: for another step
        sampling = sampling_in_progress()
        if isinstance(sampling, str):
            return None
        with undisturbed(ids.device.type):
            return Generation(ids.detach(), sampling, seed=seed_of(self._context.clock.step, "generation"))

    def _on_decode(self, ids: torch.Tensor, forward: Forward) -> None:
        """`ids` [B, 1]: what was drawn last."""
        if self._prefill is not None and self._prefill_of is forward.start:
            if self._generation is None:  # a second generation in the step is left out
                self._generation, self._drawn_from = self._prefill, forward.start
            self._prefill = None
        elif self._generation is None and forward.phase is Phase.ROLLOUT:
            reason = sampling_in_progress()
            if isinstance(reason, str):
                self._give_up(reason)
            return
        self._is_drawing = forward.start is self._drawn_from
        if self._is_drawing and self._generation is not None:
            with undisturbed(ids.device.type):
                self._generation.take_tokens(ids)

    def _on_norm(self, _: Any, output: Any) -> None:
        if not is_plain(output) or output.dim() != 3:
            return
        if torch.is_grad_enabled():
            self.computed_in = output.dtype
        else:
            self._norm_output = (weakref.ref(output), output.untyped_storage().data_ptr())
            return
        lm_head, generation, ids = self._lm_head, self._generation, self._train_ids
        if lm_head is None or generation is None or ids is None or self._head_is_called:
            return
        if output.shape[:2] != ids.shape or not generation.is_whole or not self._feeds_head:
            return
        with undisturbed(output.device.type):
            weight, bias = effective_weight(lm_head), lm_head.bias
            if not is_plain(weight):
                self._give_up("the lm_head's weight is no plain tensor (sharded or quantized)")
                return
            self._scored.append(self._with_advantage(score_hidden(generation, ids, output, weight, bias)))

    def _on_lm_head(self, x: Any, output: Any) -> None:
        if not is_plain(output) or output.dim() != 3:
            return
        if torch.is_grad_enabled():
            generation, ids = self._generation, self._train_ids
            if generation is None or ids is None or not generation.is_whole or len(output) != len(ids):
                return
            with undisturbed(output.device.type):
                scored = self._with_advantage(score_logits(generation, ids, output))
            if not self._head_is_called and self._scored:
                self._scored.pop()  # recomputed from the norm in this very forward
            self._head_is_called = True
            self._scored.append(scored)
            return
        norm_output, self._norm_output = self._norm_output, None
        listening = self._listening
        if listening is None:
            return
        if norm_output is not None and norm_output[0]() is not None and is_plain(x):
            self._feeds_head = x.untyped_storage().data_ptr() == norm_output[1]
        with undisturbed(output.device.type):
            listening.take_logits(output)

    def _with_advantage(self, scored: Scored) -> Scored:
        held = self._advantage
        return scored if held is None else scored._replace(advantage=held.index_select(0, scored.match.row))

    def _on_owner(self, _: Any, output: Any) -> None:
        if torch.is_grad_enabled() or self._prefill is None:
            return
        policy = find_policy(output)
        if policy is not None and policy.logits is not None:
            with undisturbed(policy.logits.device.type):
                self._prefill.compare_logits(policy.logits)

    @property
    def _listening(self) -> Generation | None:
        """The generation whose logits come next."""
        return self._prefill or (self._generation if self._is_drawing else None)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self.armed = False
        self.forget()
        self._tell(not_measured(reason))
