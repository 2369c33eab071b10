"""A parameter of fused experts under observation: the GEMMs by its matrices, seen as the forward calls them.

Between probed steps there is no hook. In a probed step the forward that is to be measured runs under a `GemmWatch`,
entered by a hook before it and left by one after it, also where it raises. Which call is measured, and what phase it
belongs to, follows the rules of `ModuleProbe`; a call in which nothing would be measured runs without a watch.
Gradients come from a tensor hook on each product, and the snapshot is sent with the last of them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from mxprobe.agent.guard import Hook
from mxprobe.agent.probes.gemm_watch import GemmWatch
from mxprobe.agent.probes.many_experts import ManyExpertsProbe
from mxprobe.agent.probes.module_probe import TAKEN_OUT, own_tensor
from mxprobe.measuring.adapters.adapter import Reading, first_argument
from mxprobe.measuring.adapters.expert_numbers import own_experts
from mxprobe.measuring.adapters.expert_structure import expert_parameters
from mxprobe.measuring.adapters.weight_modules import has_fused_path
from mxprobe.measuring.compat import in_backward, is_compiled
from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot, Piece, copy_gemm
from mxprobe.measuring.moe.gemm import Gemm
from mxprobe.schema import Phase


class ExpertsProbe(ManyExpertsProbe):
    """Watches the GEMMs by one parameter (`part`) that holds the matrices of several experts (see `structure`)."""

    def __init__(self, name: str, module: nn.Module, **options: Any) -> None:
        """The options are those of `ManyExpertsProbe`."""
        self.is_flipped: bool | None = None
        """The parameter is [E, K, O]; None until a GEMM was seen."""
        self._pre_handle: Any = None
        self._watch: GemmWatch | None = None
        self._filling: ExpertsSnapshot | None = None
        self._missing = 0
        """Gradients of the training snapshot that have not come yet."""
        self.rows_per_token = 1.0
        """Experts that each token is sent to."""
        super().__init__(name, module, **options)

    def arm(self) -> None:
        self.forget()
        if self._handle is None:
            measure = self._guard.hook(f"forward hook of {self.name}", self._on_forward, when=lambda: self.armed)
            before = self._guard.hook(f"hook before {self.name}", self._before, when=lambda: self.armed)
            self._handle = self.module.register_forward_hook(self._after(measure), with_kwargs=True, always_call=True)
            self._pre_handle = self.module.register_forward_pre_hook(before, with_kwargs=True)
        self.armed = True

    def _disarm(self) -> None:
        """In whatever thread. A watch that is on comes off in its own: by the hook after the forward, left for that.

        After a `KeyboardInterrupt` torch calls no hook, and there may be no other forward: the watch holds nothing.
        """
        self.armed = False
        watch = self._watch
        if watch is not None and watch.is_elsewhere:
            watch.mute()
            return
        self._leave()
        handles, self._handle, self._pre_handle = (self._handle, self._pre_handle), None, None
        for handle in handles:
            if handle is not None:
                handle.remove()

    def forget(self) -> None:
        super().forget()
        self._filling, self._missing = None, 0

    def finish_step(self) -> None:
        counted = self.armed and not self._clock.only_outputs
        super().finish_step()
        if counted:
            self.train_rows = round(self.train_rows * self.rows_per_token)
            self.rollout_rows = round(self.rollout_rows * self.rows_per_token)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None:  # another probe of the same module has just taken all out
            return
        x = first_argument(args, kwargs, "hidden_states")
        self._leave()  # of a forward that was interrupted
        if is_plain(x) and not is_off_limits(x) and self._is_wanted():
            self._enter()

    def _is_wanted(self) -> bool:
        """Whether the call that begins can be one that is measured."""
        if not self.trains:
            return not self._rollout_done
        if torch.is_grad_enabled():
            return not self._train_seen and (self._rollout_done or not self._clock.only_outputs)
        return not (in_backward() or self._train_seen or self._rollout_done)

    def _enter(self) -> None:
        own = own_experts(expert_parameters(self.module).get(self.part), self.first_expert)
        if own is None:
            self.why_unread = "its weight is no plain tensor (sharded within experts, or quantized)"
            return
        parameter, first = own
        if any(is_compiled(each) for each in self.module.modules()):
            self.why_unread = "a part of it runs inside torch.compile, and would be compiled anew under a function mode"
            return
        if any(has_fused_path(each) or isinstance(each, nn.MultiheadAttention) for each in self.module.modules()):
            self.why_unread = "a part of it has a fused inference path, which a function mode would switch off"
            return
        snapshot = self._filling = ExpertsSnapshot(
            module=self.name,
            phase=Phase.EVAL.value,
            step=self._clock.step,
            micro_step=max(self._clock.micro_step, 0),
            time_ns=time.time_ns(),
            with_weights=self._clock.with_weights,
        )
        self._watch = GemmWatch(
            {self.part: parameter},
            lambda gemm: self._on_gemm(snapshot, parameter.detach(), first, gemm),
            lambda error: self._guard.swallow(f"watching the GEMMs of {self.name}", error),
        )
        if self.armed:
            self._watch.enter()
        else:  # taken off meanwhile, by another thread
            self._watch = None

    def _leave(self) -> None:
        watch = self._watch
        if watch is not None and not watch.is_elsewhere:
            self._watch = None
            watch.leave()

    def _after(self, measure: Hook) -> Hook:
        """Return a hook that takes the watch off, whatever has happened meanwhile, and then measures."""

        def after(*args: Any) -> None:
            self._guard.attempt(f"hook after {self.name}", self._leave)
            if not self.armed:
                self._guard.attempt(f"hook after {self.name}", self._disarm)
            measure(*args)

        return after

    def _on_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = TAKEN_OUT
    ) -> None:
        if output is None:  # it raised: some of its products are missing, and it may be called again
            self.why_unread = "its forward raised, or returned nothing"
            if self._filling is not None:
                self._filling, self._missing = None, 0
            return
        try:
            super()._on_forward(module, args, kwargs, output)
        finally:
            self._filling = None

    def _on_gemm(self, snapshot: ExpertsSnapshot, parameter: torch.Tensor, first: int, gemm: Gemm) -> None:
        """In the training thread, right after the product."""
        started = time.perf_counter_ns()
        if is_plain(gemm.x) and is_plain(gemm.output):
            with undisturbed(gemm.x.device.type):
                piece = self._copy(snapshot, parameter, first, gemm)
            if piece is not None and gemm.output.requires_grad:
                self._missing += 1
                own_tensor(gemm.output).register_hook(self._product_hook(snapshot, piece, gemm))
        self._clock.hook_ns += time.perf_counter_ns() - started

    def _copy(self, snapshot: ExpertsSnapshot, parameter: torch.Tensor, first: int, gemm: Gemm) -> Piece | None:
        weight = parameter.mT if self._flipped(parameter, gemm) else parameter
        if weight.shape[1:] != (gemm.n_features, gemm.x.shape[-1]):
            self.withheld = "some of its products are by a part of the matrix, and are not measured"
            return None
        if snapshot.layout is None:
            snapshot.layout = self._layout(weight, first)
            snapshot.dtype = gemm.output.dtype
        snapshot.n_rows += gemm.x.shape[0]
        snapshot.n_seen += gemm.expert is not None and gemm.x.shape[0] > 0
        copied = copy_gemm(gemm, snapshot.layout, weight)
        if copied is None:
            return None
        piece, snapshot.all_counts = copied
        snapshot.pieces.append(piece)
        return piece

    def _flipped(self, parameter: torch.Tensor, gemm: Gemm) -> bool:
        """Whether the parameter holds W^T: by its shape, or where W is square by a GEMM that reads it itself."""
        _, a, b = parameter.shape
        if a != b:
            self.is_flipped = b != gemm.x.shape[-1]
        elif self.is_flipped is None or not gemm.is_copy:
            self.is_flipped = gemm.is_flipped
        return self.is_flipped

    def _product_hook(self, snapshot: ExpertsSnapshot, piece: Piece, gemm: Gemm) -> Hook:
        rows_of = gemm.rows_of

        def on_gradient(gradient: torch.Tensor) -> None:
            awaited: Any = self._train
            if not self.armed or awaited is not snapshot:
                return
            self._missing -= 1
            if is_plain(gradient) and not is_off_limits(gradient):
                with undisturbed(gradient.device.type):
                    piece.add_gradient(rows_of(gradient))
            if not self._missing:
                self._train = None
                self._send(snapshot)  # pyright: ignore[reportArgumentType]

        return self._guard.hook(f"gradient hook of {self.name}", on_gradient)

    def _expect_gradient(self, snapshot: Any, on_gradient: Any, reading: Reading) -> None:
        if not self._missing:  # nothing of it needs a gradient
            self._train = None
            self._send(snapshot)

    def _snapshot(self, reading: Reading, phase: Phase) -> Any:
        snapshot, self._filling = self._filling, None
        if snapshot is None:
            return None
        if not snapshot.pieces:
            self.why_unread = "its products are not made by a torch function that can be watched (a fused kernel)"
            return None
        snapshot.phase = phase.value
        snapshot.with_operands = self._with_operands(phase)
        self.rows_per_token = snapshot.n_rows / max(reading.x.numel() // reading.x.shape[-1], 1)
        return snapshot
