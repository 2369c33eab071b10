"""What observing the experts of one module has in common, whichever way their GEMMs are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.measuring.moe.expert_snapshot import CPU_ELEMENTS, DEVICE_ELEMENTS, Layout
from mxprobe.measuring.operands.extent import working_bytes
from mxprobe.measuring.sampling import seed_of
from mxprobe.schema import Phase, Role

MIN_ELEMENTS = 1 << 17
"""Of one copied operand: a tile of 32 tokens, and 32 features, at a width of 4,096."""


class ManyExpertsProbe(ModuleProbe):
    """Its snapshots are `ExpertsSnapshot`, of as many experts at a time as fit."""

    def __init__(
        self, name: str, module: nn.Module, *, every_expert: bool, first_expert: int = 0, **options: Any
    ) -> None:
        """`every_expert`: measure all of them at each probed step; `first_expert`: the number of the first one held.

        The other options are those of `ModuleProbe`.
        """
        self._every_expert = every_expert
        self.first_expert = first_expert
        device = next((p.device.type for p in module.parameters()), "cpu")
        self._elements = CPU_ELEMENTS if device == "cpu" else DEVICE_ELEMENTS
        super().__init__(name, module, **options)

    @property
    def sample_bytes(self) -> int:
        """Upper bound of what one armed step copies of this module: x, y, g and the weight twice, in two phases."""
        return 2 * 5 * 4 * self._elements

    @property
    def working_bytes(self) -> int:
        return working_bytes((self._elements,) * len(Role))

    def shrink(self, max_bytes: int) -> bool:
        """Copy of fewer experts, rows and features from now on; whether that was needed."""
        before = self._elements
        while self.sample_bytes + self.working_bytes > max_bytes and self._elements > MIN_ELEMENTS:
            self._elements //= 2
        return before != self._elements

    def _layout(self, weight: torch.Tensor, first: int) -> Layout:
        """Of this step, for weight [E, O, K], whose first expert has that number."""
        how: dict[str, Any] = {"every": self._every_expert, "seed": seed_of(self._clock.step, self.name)}
        return Layout.plan(weight, first=first, elements=self._elements, **how)

    def _join_decode_step(self, prefill: Any, reading: Any) -> None:
        """The prefill alone is measured: its tokens tell the experts' rows apart, a decode step has few."""
        self._rollout_done = True
        prefill.phase = Phase.ROLLOUT.value
        self._send(prefill)
