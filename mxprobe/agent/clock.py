"""Which optimizer step is being computed, what of it is probed, and what the hooks have cost so far."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Steps are counted since attach; `Worker` adds the run's own count. Written by the training thread only.

    `step` is the one being computed, 1 for the first after attach.
    """

    def __init__(self) -> None:
        self.step = 1
        self.micro_step = -1
        """Forward passes with gradient of the root in this step, less one."""
        self.n_decodes = 0
        """One-token calls seen in this step: the mark of generation."""
        self.probed = False
        self.with_weights = False
        self.only_outputs = False
        """This step is watched for generation alone: realised errors, no decomposition."""
        self.generated = False
        """A generation was measured in this step."""
        self.keeps_versions = False
        """This step is near one that is probed: its weights are kept."""
        self.is_affordable = True
        """What the probe may cost is not spent."""
        self.is_slower = False
        """This step is run another way than the others, to be seen."""
        self.is_last = False
        """The hooks come out at the end of this step."""
        self.hook_ns = 0
        self.step_ns = 0
        self.ended_ns = 0
        """When the last step was over, by the wall clock."""
        self._last_ns = time.perf_counter_ns()

    @property
    def is_watched(self) -> bool:
        """Whether hooks are in for this step alone."""
        return self.probed or self.only_outputs

    def advance(self) -> None:
        """The step is over; call at an optimizer-step boundary."""
        now, self.ended_ns = time.perf_counter_ns(), time.time_ns()
        self.step_ns, self._last_ns = now - self._last_ns, now

    def next(self) -> None:
        self.step += 1
        self.micro_step = -1
        self.n_decodes = 0
        self.hook_ns = 0
        self.probed = self.with_weights = self.only_outputs = False
        self.generated = self.keeps_versions = self.is_slower = False


def completed_steps(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The optimizer's own count of steps (float64 [], a copy on its device), or None where it keeps none.

    Read from its state, where Adam and its kin keep `step`, else from its parameter groups. A copy, so that it
    can be read later, in a thread that may wait for the device. Equal to transformers' `global_step`.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            count = _as_tensor(state.get("step")) if isinstance(state, dict) else None
            if count is not None:
                return count
    return _as_tensor(optimizer.param_groups[0].get("step")) if optimizer.param_groups else None


def _as_tensor(step: Any) -> torch.Tensor | None:
    if type(step) is torch.Tensor and step.numel() == 1:
        return step.detach().reshape(()).to(torch.float64, copy=True)
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        return torch.tensor(float(step), dtype=torch.float64)
    return None
