"""Which micro batch of a step is computed: forward passes with gradient of a root, counted by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.part import TRAINER, Part
from mxprobe.measuring.compat import in_backward


class MicroBatches(Part):
    name = "micro batches"
    roles = (TRAINER,)

    def __init__(self, clock: Clock, guard: Guard) -> None:
        self._clock = clock
        self._guard = guard
        self._handles: list[Any] = []

    def watch(self, roots: Sequence[nn.Module]) -> None:
        hook = self._guard.hook(self.name, self._on_enter)
        self._handles = [root.register_forward_pre_hook(hook) for root in roots]

    def remove(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            self._guard.attempt("removing hooks", handle.remove)

    def _on_enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._clock.micro_step += 1
