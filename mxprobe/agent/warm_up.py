"""Kernels compiled in our own thread before the first hook goes in: what is measured is measured once, on zeros.

Until that is over no step is probed, and the run goes on. An event says how long it took. Compiled kernels are kept
where the process keeps those of its own (triton's cache). Not verified on a GPU.
"""

from __future__ import annotations

import time
from typing import Any, Callable

import torch

from mxprobe.agent.operands import Operand, measure_corrections, measure_operand
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role

EVENT = "kernels"
SIZES = (64, 1024)
"""Of the operands: some kernels are others for large blocks."""


class WarmUp:
    """`begin` in the training thread; the job is the worker's."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self.is_busy = False
        """Steps are not to be probed yet."""
        self._tell = tell

    def begin(self, worker: Any, device: torch.device, dtype: torch.dtype, config: AgentConfig) -> None:
        """Where kernels are compiled: on a GPU. `worker`: the session's."""
        self.is_busy = True

        def job() -> None:
            started = time.perf_counter()
            try:
                worker.aside(device, [], lambda: measure_zeros(device, dtype, config))
            finally:
                self.is_busy = False
            self._tell(EVENT, f"ready after {time.perf_counter() - started:.1f} s, in which no step was probed")

        worker.put(job)


def measure_zeros(device: torch.device, dtype: torch.dtype, config: AgentConfig) -> None:
    """All that is done with an operand, of each kind that comes: rows and columns of W, in its dtype and in float32."""
    for size in SIZES:
        for kind in dict.fromkeys((dtype, torch.float32)):
            a = torch.zeros(size, size, dtype=kind, device=device)
            for role, each in ((Role.W_FWD, a), (Role.W_DGRAD, a.T)):
                measured = measure_operand(
                    Operand(role, each, a[:, :32], 1.0, size), format=config.format, rule=config.rule
                )
                for _ in measure_corrections([measured], config.whatifs):
                    pass
