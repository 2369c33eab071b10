"""One Linear under observation: a forward hook, and a tensor hook on its output for the gradient.

Only these two: full backward hooks wrap the output and break models that change it in place. Where the output is
another shape of a tensor of its own (the product of a [batch, tokens, features] input), the tensor hook goes on that:
a view changed in place afterwards gets a new gradient function, and a hook on it is never called. Both return None
whatever happens. Nothing is measured here; copies go to `Worker`.

Phases. Gradient enabled is training. A call without gradient is kept until what follows tells what it was: a
one-token call of the same module makes it the prefill of a generation (`rollout`, measured with the first decode
step), a training call or the end of the step makes it `eval`. With gradient accumulation the first micro batch
that reaches the module in a probed step is the one measured.

Activation checkpointing runs a region twice. The second run is recognised by the backward pass around it, and
counts only where the first ran without gradient (the reentrant kind).
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard, in_backward, is_off_limits, is_plain, undisturbed
from mxprobe.agent.sampling import seed_of, take
from mxprobe.agent.snapshot import Snapshot, sample_rows
from mxprobe.agent.weights import WeightSample, sample_weight
from mxprobe.schema import Phase

Submit = Callable[[Snapshot], None]


class ModuleProbe:
    """Watches one module. `arm` and `finish_step` are called between steps, hooks in whatever thread runs them."""

    def __init__(
        self,
        name: str,
        module: nn.Linear,
        *,
        clock: Clock,
        guard: Guard,
        submit: Submit,
        max_rows: int,
        max_features: int,
        trains: bool,
    ) -> None:
        self.name = name
        self.module = module
        self.armed = False
        self.train_rows = 0
        """Rows through the module in the last probed step, with gradient (each counted once)."""
        self.rollout_rows = 0
        self.last_probed = -1
        self.why_unread = ""
        """Set where a call was seen whose tensors cannot be read."""
        self.n_lost_gradients = 0
        """Probed steps in which the output required a gradient and none came."""
        self._clock = clock
        self._guard = guard
        self._submit = submit
        self._max_rows = max_rows
        self._max_features = max_features
        self.trains = trains
        self._reentrant = False
        self._pid = os.getpid()
        self._handle: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop what is held of the step that ended."""
        self._train: Snapshot | None = None
        self._train_seen = False
        self._pending: Snapshot | None = None
        self._pending_decodes = 0
        self._rollout_done = False
        self._eval_done = False
        self._weights: dict[bool, WeightSample] = {}
        """With gradient, and without: noise may be on the weights in one of them."""
        self._train_rows = self._rollout_rows = self._undecided_rows = 0

    def arm(self) -> None:
        """Between probed steps there is no hook: a module that has one takes torch's slow path at each call."""
        self.forget()
        if self._handle is None:
            self._handle = self.module.register_forward_hook(self._forward_hook)
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
    def sample_bytes(self) -> int:
        """Upper bound of what one armed step copies of this module."""
        out_features, in_features = self.module.out_features, self.module.in_features
        rows = 2 * self._max_rows * (in_features + 2 * out_features)
        weight = min(out_features, self._max_features) * in_features
        weight += min(in_features, self._max_features) * out_features
        return (rows + 2 * weight) * 4  # the weight with gradient and without

    def finish_step(self) -> None:
        """The optimizer has stepped: send what is still held, and disarm."""
        if not self.armed:
            return
        self._disarm()
        if self._train is not None:
            self.n_lost_gradients += 1
            self._send(self._train)
        self._resolve_pending()
        if not self._clock.only_outputs:
            self.train_rows, self.rollout_rows = self._train_rows, self._rollout_rows
            self.last_probed = self._clock.step

    @property
    def saw_rollout(self) -> bool:
        return self._rollout_done

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not self.armed:
            return
        if os.getpid() != self._pid:  # a forked child has no thread of ours, and perhaps a lock that stays taken
            self.armed = False
            return
        started = time.perf_counter_ns()
        try:
            self._on_call(args, output)
        except Exception as error:
            self._guard.swallow(f"forward hook of {self.name}", error)
        self._clock.hook_ns += time.perf_counter_ns() - started

    def _on_call(self, args: tuple[Any, ...], output: Any) -> None:
        x: Any = args[0] if args else None
        if not (is_plain(x) and is_plain(output) and x.dim() and x.numel()):
            self.why_unread = f"input is a {type(x).__name__}, output a {type(output).__name__}"
            return
        if is_off_limits(x):
            self.why_unread = "called under tracing, functorch or CUDA-graph capture"
            return
        if not self.trains:
            self._on_serving_call(x, output)
        elif torch.is_grad_enabled():
            self._on_training_call(x, output)
        elif not in_backward():
            self._on_no_grad_call(x, output)

    def _on_training_call(self, x: torch.Tensor, output: torch.Tensor) -> None:
        recomputed = in_backward()
        if recomputed and not self._reentrant:
            if self._train_seen:
                return  # counted in the first pass
            self._reentrant = True
        n_rows = _rows(x)
        self._train_rows += n_rows
        if self._reentrant:
            self._pending = None  # the same region's first pass
        self._resolve_pending()
        if self._train_seen:
            return
        self._train_seen = True
        if self._clock.only_outputs and not self._rollout_done:
            return
        snapshot = self._snapshot(x, output, Phase.TRAIN)
        if snapshot is None:
            return
        if output.requires_grad and snapshot.with_operands:
            self._train = snapshot
            self._expect_gradient(snapshot, output)
        else:
            self._send(snapshot)

    def _expect_gradient(self, snapshot: Snapshot, output: torch.Tensor) -> None:
        own_tensor(output).register_hook(self._gradient_hook(snapshot))

    def _gradient_hook(self, snapshot: Snapshot) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if not self.armed or self._train is not snapshot or os.getpid() != self._pid:
                return
            started = time.perf_counter_ns()
            try:
                self._train = None
                if is_plain(gradient) and not is_off_limits(gradient):
                    with undisturbed(gradient.device.type):
                        snapshot.add_gradient(gradient)
                self._send(snapshot)
            except Exception as error:
                self._guard.swallow(f"gradient hook of {self.name}", error)
            self._clock.hook_ns += time.perf_counter_ns() - started

        return hook

    def _on_no_grad_call(self, x: torch.Tensor, output: torch.Tensor) -> None:
        n_rows = _rows(x)
        if x.dim() >= 3 and x.shape[-2] == 1:
            self._clock.n_decodes += 1
            self._rollout_rows += self._undecided_rows + n_rows
            self._undecided_rows = 0
            if self._pending is not None and not self._rollout_done:
                self._join_decode_step(self._pending, x, output)
            self._pending = None
            return
        if self._train_seen:
            return
        self._resolve_pending()
        self._undecided_rows = n_rows
        self._pending_decodes = self._clock.n_decodes
        if not (self._rollout_done and self._eval_done):
            self._pending = self._snapshot(x, output, Phase.EVAL)

    def _join_decode_step(self, prefill: Snapshot, x: torch.Tensor, output: torch.Tensor) -> None:
        decode = self._snapshot(x, output, Phase.ROLLOUT)
        if decode is not None:
            with undisturbed(x.device.type):
                prefill.append_rows(decode)
        self._rollout_done = True
        prefill.phase = Phase.ROLLOUT.value
        self._send(prefill)

    def _resolve_pending(self) -> None:
        """What the call without gradient was, now that no one-token call of this module followed it.

        A module that sees no token axis (experts get [tokens, features]) is judged by the others' decode steps.
        """
        snapshot, self._pending = self._pending, None
        generated = self._clock.n_decodes > self._pending_decodes
        if generated:
            self._rollout_rows += self._undecided_rows
        self._undecided_rows = 0
        if snapshot is None:
            return
        if generated and not self._rollout_done:
            self._rollout_done = True
            snapshot.phase = Phase.ROLLOUT.value
            self._send(snapshot)
        elif not generated and not self._eval_done:
            self._eval_done = True
            self._send(snapshot)

    def _on_serving_call(self, x: torch.Tensor, output: torch.Tensor) -> None:
        self._rollout_rows += _rows(x)
        if self._rollout_done:
            return
        self._rollout_done = True
        snapshot = self._snapshot(x, output, Phase.ROLLOUT)
        if snapshot is not None:
            self._send(snapshot)

    def _snapshot(self, x: torch.Tensor, output: torch.Tensor, phase: Phase) -> Snapshot | None:
        seed = seed_of(self._clock.step, self.name)
        with undisturbed(x.device.type):
            weight = self._weights.get(phase is Phase.TRAIN)
            if weight is None:
                weight = sample_weight(self.module, max_features=self._max_features, seed=seed)
            if weight is None:
                self.why_unread = "weight is not a plain two-dimensional tensor"
                return None
            self._weights[phase is Phase.TRAIN] = weight
            out_features = weight.columns.shape[0]
            index = sample_rows(x, max_rows=self._max_rows, out_features=out_features, seed=seed)
            whole = output.detach().reshape(-1, output.shape[-1])
            y = take(whole if weight.out_index is None else whole.index_select(1, weight.out_index), index)
            watched = y
            if weight.watched is not weight.rows:
                watched = take(whole.index_select(1, weight.watched_index), index)
            return Snapshot(
                module=self.name,
                phase=phase.value,
                step=self._clock.step,
                micro_step=max(self._clock.micro_step, 0),
                time_ns=time.time_ns(),
                n_rows=_rows(x),
                row_index=index,
                x=take(x.detach().reshape(-1, x.shape[-1]), index),
                y=y,
                y_watched=watched,
                weight=weight,
                with_operands=not self._clock.only_outputs and (phase is Phase.TRAIN or not self.trains),
                with_weights=self._clock.with_weights,
            )

    def _send(self, snapshot: Snapshot) -> None:
        self._train = None if snapshot is self._train else self._train
        snapshot.mark_ready()
        self._submit(snapshot)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def own_tensor(output: torch.Tensor) -> torch.Tensor:
    """The tensor whose gradient is the output's, whatever is done to the output in place afterwards.

    A view of a part of something larger is returned as it is.
    """
    base = output._base  # pyright: ignore[reportPrivateUsage]
    if base is None or base.grad_fn is None or base.numel() != output.numel() or not is_plain(base):
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


def any_rollout(probes: list[ModuleProbe]) -> bool:
    """Whether a generation was measured in the step that ended; ask between `finish_step` and `forget`."""
    return any(probe.saw_rollout for probe in probes)
