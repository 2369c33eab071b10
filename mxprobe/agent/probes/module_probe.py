"""One GEMM of a module under observation: a forward hook, and a tensor hook on its output for the gradient.

What of a call are the operands is for the module's adapter to say (`mxprobe.measuring.adapters`).

Only these two: full backward hooks wrap the output and break models that change it in place. Where the output is
another shape of a tensor of its own (the product of a [batch, tokens, features] input), the tensor hook goes on that:
a view changed in place afterwards gets a new gradient function, and a hook on it is never called. Both return None
whatever happens. Nothing is measured here; copies go to `Worker`.

What a call belongs to, `Phases` says. Of each phase the first call in a probed step is measured: of training the first
micro batch; of a generation its first forward, joined with the first decode step where there is a KV cache. A copy of a
call without gradient is kept until it is known what the call was.

Activation checkpointing runs a region twice. The second run is recognised by the backward pass around it, and
counts only where the first ran without gradient (the reentrant kind).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard, Hook
from mxprobe.agent.phases import Phases
from mxprobe.measuring.adapters.adapter import Reading
from mxprobe.measuring.adapters.families import adapter_of
from mxprobe.measuring.compat import base_of, in_backward
from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed
from mxprobe.measuring.operands.copying import n_rows, snapshot_of
from mxprobe.measuring.operands.extent import Extent, element_bytes
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import WeightSample, sample_weight
from mxprobe.measuring.phase_rules import Forward, Kind
from mxprobe.measuring.sampling import seed_of
from mxprobe.schema import Phase

Submit = Callable[[Snapshot], None]
MAX_UNDECIDED = 64
"""Calls without gradient whose rows may still turn out to be a rollout's."""


TAKEN_OUT: Any = object()
"""A hook's output where another hook of the same call has taken it out since: torch then calls it without kwargs."""


class ModuleProbe:
    """Watches one module. `arm` and `finish_step` are called between steps, hooks in whatever thread runs them."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        clock: Clock,
        guard: Guard,
        submit: Submit,
        max_rows: int,
        max_features: int,
        trains: bool,
        part: str = "",
        token_group: str = "",
        phases: Phases | None = None,
    ) -> None:
        """`part`: which of the module's GEMMs, as its adapter calls it; `token_group`: see `Placement`.

        `phases`: what tells the calls apart; by default the module's own calls alone do.
        """
        adapter = adapter_of(module)
        if adapter is None:
            raise TypeError(f"no adapter for {type(module).__name__}")
        self.name = name
        self.module = module
        self.part = part
        self._adapter = adapter
        self._token_group = token_group
        self.armed = False
        self.train_rows = 0
        """Rows through the module in the last probed step, with gradient (each counted once)."""
        self.rollout_rows = 0
        self.last_probed = -1
        self.weights_alone = False
        """Its weights were measured without a call."""
        self.why_unread = ""
        """Set where a call was seen whose tensors cannot be read."""
        self.withheld = ""
        """Why its output is not compared with x W^T, where the module does not show it."""
        self.n_lost_gradients = 0
        """Probed steps in which the output required a gradient and none came."""
        self._clock = clock
        self._guard = guard
        self._phases = Phases(clock, guard) if phases is None else phases
        self._submit = submit
        self._max_rows = max_rows
        self._max_features = max_features
        self.trains = trains
        self._reentrant = False
        self._handle: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop what is held of the step that ended."""
        self._train: Snapshot | None = None
        self._train_seen = False
        self._first_pass: Snapshot | None = None
        """Of a training forward, without gradient: of a checkpointed region, or of a part that is not trained."""
        self._waiting: list[tuple[Forward, Snapshot]] = []
        """Calls without gradient that were not sent yet: the first, and the latest."""
        self._undecided: list[tuple[Forward, int]] = []
        """Rows of calls of which it is not known whether they are a rollout's."""
        self._rollout_done = False
        self._eval_done = False
        self._weights: dict[bool, WeightSample] = {}
        """With gradient, and without: noise may be on the weights in one of them."""
        self._train_rows = self._rollout_rows = self._first_pass_rows = 0

    def arm(self) -> None:
        """Between probed steps there is no hook: a module that has one takes torch's slow path at each call."""
        self.forget()
        if self._handle is None:
            hook = self._guard.hook(f"forward hook of {self.name}", self._on_forward, when=lambda: self.armed)
            self._handle = self.module.register_forward_hook(hook, with_kwargs=True, prepend=self._adapter.prepend)
        self.armed = True

    def remove(self) -> None:
        self._disarm()
        self.forget()

    def _disarm(self) -> None:
        self.armed = False
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    @property
    def _extent(self) -> Extent:
        out_features, in_features = self._adapter.shape(self.module, self.part)
        return Extent(out_features, in_features, element_bytes(self.module), self._max_rows, self._max_features)

    @property
    def sample_bytes(self) -> int:
        """Upper bound of what one armed step copies of this module."""
        return self._extent.sample_bytes

    @property
    def working_bytes(self) -> int:
        """Upper bound of what measuring these copies takes for itself, on a device."""
        return self._extent.working_bytes

    def shrink(self, max_bytes: int) -> bool:
        """Copy fewer rows and features from now on, so that copies and measuring fit; whether that was needed."""
        extent = self._extent
        is_smaller = extent.shrink(max_bytes)
        self._max_rows, self._max_features = extent.max_rows, extent.max_features
        return is_smaller

    def finish_step(self) -> None:
        """The optimizer has stepped: send what is still held, and disarm."""
        if not self.armed:
            return
        self._disarm()
        if self._train is not None:
            self.n_lost_gradients += 1
            self._send(self._train)
        self._send_waiting(are_over=True)
        if self._first_pass is not None:
            self._send(self._first_pass)
        self._train_rows += self._first_pass_rows
        self._rollout_rows += sum(n for forward, n in self._undecided if forward.phase is Phase.ROLLOUT)
        if not self._clock.only_outputs:
            self.train_rows, self.rollout_rows = self._train_rows, self._rollout_rows
            self.last_probed = self._clock.step

    @property
    def saw_rollout(self) -> bool:
        return self._rollout_done

    def _on_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = TAKEN_OUT
    ) -> None:
        if output is not TAKEN_OUT:
            self._on_call(args, kwargs, output)

    def _on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        reading = self._adapter.read(self.module, self.part, args, kwargs, output)
        if isinstance(reading, str):
            self.why_unread = reading
            return
        x = reading.x
        if not (x.dim() and x.numel()):
            self.why_unread = "called without a row"
            return
        if is_off_limits(x):
            self.why_unread = "called under tracing, functorch or CUDA-graph capture"
            return
        if not self.trains:
            self._on_serving_call(reading)
        elif in_backward():
            if torch.is_grad_enabled():
                self.on_training_call(reading)
        else:
            forward = self._phases.call(self, x)
            if torch.is_grad_enabled() and forward.kind is not Kind.ROLLOUT:
                self.on_training_call(reading)
            elif forward.kind is Kind.TRAINING:
                self._on_first_pass(reading)
            else:
                self._on_other_call(reading, forward)

    def on_training_call(self, reading: Reading, *, is_repetition: bool | None = None) -> None:
        """A call with gradient, of a module that trains; by the forward hook, or by an operator in a compiled graph.

        `is_repetition`: of a checkpointed region; None where it is told by the backward pass around it.
        """
        recomputed = in_backward() if is_repetition is None else is_repetition
        if recomputed and not self._reentrant:
            if self._train_seen:
                return  # counted in the first pass
            self._reentrant = True
        self._train_rows += n_rows(reading.x)
        if self._reentrant:
            self._drop_first_pass()
        self._send_waiting(are_over=True)
        if self._train_seen:
            return
        self._train_seen = True
        if self._clock.only_outputs and not self._rollout_done:
            return
        snapshot = self._snapshot(reading, Phase.TRAIN)
        if snapshot is None:
            return
        output, on_gradient = reading.output, reading.on_gradient
        if on_gradient is None and output is not None and output.requires_grad:
            on_gradient = own_tensor(output).register_hook
        if on_gradient is not None and snapshot.with_operands:
            self._train = snapshot
            self._expect_gradient(snapshot, on_gradient, reading)
        else:
            self._send(snapshot)

    def _expect_gradient(
        self, snapshot: Snapshot, on_gradient: Callable[[Callable[[torch.Tensor], None]], Any], reading: Reading
    ) -> None:
        # The hook must not keep the call alive.
        lean = reading._replace(x=reading.x.new_empty(0), output=None, y=None, on_gradient=None)
        on_gradient(self._gradient_hook(snapshot, lean))

    def _gradient_hook(self, snapshot: Snapshot, reading: Reading) -> Hook:
        def on_gradient(gradient: torch.Tensor) -> None:
            if not self.armed or self._train is not snapshot:
                return
            self._train = None
            g = self._adapter.gradient(gradient, reading)
            if g is not None and not is_off_limits(g):
                with undisturbed(g.device.type):
                    snapshot.add_gradient(g)
            self._send(snapshot)

        return self._guard.hook(f"gradient hook of {self.name}", on_gradient)

    def _on_first_pass(self, reading: Reading) -> None:
        """In a training forward, without gradient. If it is run again in the backward pass, that is the call."""
        if self._reentrant:
            return
        self._first_pass_rows += n_rows(reading.x)
        is_wanted = self._rollout_done or not self._clock.only_outputs
        if is_wanted and self._first_pass is None and not self._train_seen:
            self._first_pass = self._snapshot(reading, Phase.TRAIN)

    def _drop_first_pass(self) -> None:
        self._first_pass, self._first_pass_rows = None, 0
        if self._waiting and self._waiting[-1][0].phase is None:  # of a region that is called outside of the model
            self._waiting.pop()

    def _on_other_call(self, reading: Reading, forward: Forward) -> None:
        """Of a rollout, or not known to be of one yet."""
        if forward.phase is Phase.ROLLOUT:
            self._rollout_rows += n_rows(reading.x)
        elif not forward.follows_training:
            self._undecided = [*self._undecided[1 - MAX_UNDECIDED :], (forward, n_rows(reading.x))]
        if forward.start is not forward:
            self._on_continuation(reading, forward)
            return
        if forward.follows_training:
            return
        self._send_waiting()
        if _is_one_token(reading.x) and forward.length not in (None, 1):
            return  # the head of a prefill is given its last token alone
        is_measured = self._rollout_done if forward.phase is Phase.ROLLOUT else self._rollout_done and self._eval_done
        if not is_measured:
            snapshot = self._snapshot(reading, Phase.EVAL)
            if snapshot is not None:
                self._waiting = [*self._waiting[:1], (forward, snapshot)]

    def _on_continuation(self, reading: Reading, forward: Forward) -> None:
        """A decode step, or the same sequences with one more token: their first forward is the one that is measured."""
        held = next((each for each in self._waiting if each[0] is forward.start), None)
        if held is None or forward.phase is not Phase.ROLLOUT:
            return
        self._waiting.remove(held)
        if self._rollout_done:
            return
        if _is_one_token(reading.x):
            self._join_decode_step(held[1], reading)
        else:
            self._send_rollout(held[1])

    def _join_decode_step(self, prefill: Snapshot, reading: Reading) -> None:
        decode = self._snapshot(reading, Phase.ROLLOUT)
        if decode is not None:
            with undisturbed(reading.x.device.type):
                prefill.append_rows(decode)
        self._send_rollout(prefill)

    def _send_rollout(self, snapshot: Any) -> None:
        self._rollout_done = True
        snapshot.phase = Phase.ROLLOUT.value
        self._send(snapshot)

    def _send_waiting(self, *, are_over: bool = False) -> None:
        """Send what is known to be the first of its phase. `are_over`: this thread trains, or the step has ended."""
        waiting, self._waiting = self._waiting, []
        for forward, snapshot in waiting:
            phase = forward.phase
            if phase is None and are_over and forward.is_of_this_thread:
                phase = Phase.EVAL
            if phase is None:
                self._waiting.append((forward, snapshot))
            elif phase is Phase.ROLLOUT and not self._rollout_done:
                self._send_rollout(snapshot)
            elif phase is Phase.EVAL and not self._eval_done:
                self._eval_done = True
                self._send(snapshot)

    def _on_serving_call(self, reading: Reading) -> None:
        self._rollout_rows += n_rows(reading.x)
        if self._rollout_done:
            return
        self._rollout_done = True
        snapshot = self._snapshot(reading, Phase.ROLLOUT)
        if snapshot is not None:
            self._send(snapshot)

    def _with_operands(self, phase: Phase) -> bool:
        """Whether a call of that phase is decomposed, and not only its output looked at."""
        return not self._clock.only_outputs and (phase is Phase.TRAIN or not self.trains)

    def _snapshot(self, reading: Reading, phase: Phase) -> Snapshot | None:
        x = reading.x
        seed = seed_of(self._clock.step, self.name)
        with undisturbed(x.device.type):
            weight = self._weights.get(phase is Phase.TRAIN)
            if weight is None:
                weight = sample_weight(
                    self.module, max_features=self._max_features, seed=seed, part=self.part, given=reading.weight
                )
            if weight is None:
                self.why_unread = "weight is not a plain two-dimensional tensor"
                return None
            self._weights[phase is Phase.TRAIN] = weight
            self.withheld = reading.withheld
            return snapshot_of(
                reading,
                weight,
                module=self.name,
                phase=phase,
                step=self._clock.step,
                micro_step=max(self._clock.micro_step, 0),
                seed=seed,
                max_rows=self._max_rows,
                with_operands=self._with_operands(phase),
                with_weights=self._clock.with_weights,
                token_group=self._token_group,
            )

    def _send(self, snapshot: Snapshot) -> None:
        self._train = None if snapshot is self._train else self._train
        snapshot.mark_ready()
        self._submit(snapshot)


def _is_one_token(x: torch.Tensor) -> bool:
    """Whether x [..., T, K] holds a single token of each sequence; False where it has no axis of tokens."""
    return x.dim() >= 3 and x.shape[-2] == 1


def own_tensor(output: torch.Tensor) -> torch.Tensor:
    """The tensor whose gradient is the output's, whatever is done to the output in place afterwards.

    A view of a part of something larger is returned as it is.
    """
    base = base_of(output)
    if base is None or base.grad_fn is None or base.numel() != output.numel() or not is_plain(base):
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


def any_rollout(probes: list[ModuleProbe]) -> bool:
    """Whether a generation was measured in the step that ended; ask between `finish_step` and `forget`."""
    return any(probe.saw_rollout for probe in probes)
