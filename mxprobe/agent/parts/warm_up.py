"""Kernels compiled in our own thread before the first hook goes in: what is measured is measured once, on zeros.

Until that is over no step is probed, and the run goes on. `status`, `run.json` and an event say how long it took. What
Triton compiles for it is kept in a private directory on a local disk (`mxprobe_kernels.triton_cache`), unless the
process has a choice of its own. An agent that travelled has no kernels for Triton. Not verified on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mxprobe.agent.part import Part
from mxprobe.agent.worker import Worker
from mxprobe.events import Event, Tell
from mxprobe.measuring.operands.operand import Operand, measure_operand
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role
from mxprobe_kernels.frontend import has_triton
from mxprobe_kernels.policy import token_statistics

SIZES = (64, 512)
"""Of the operands: some kernels are others for large blocks."""
VOCABULARIES = (4096, 4097)
"""Kernels are compiled for widths that are multiples of 16, and for others; in chunks of 2,048."""


class WarmUp(Part):
    name = "kernels"

    def __init__(self, worker: Worker, config: AgentConfig, tell: Tell) -> None:
        self.took_ms: float | None = None
        """None where nothing is compiled, or is not yet."""
        self.where = ""
        """Directory of what Triton compiled; "" where it is the process's own, or nothing was."""
        self._worker = worker
        self._config = config
        self._tell = tell

    def watch(self, roots: Sequence[nn.Module]) -> None:
        first = next((p for root in roots for p in root.parameters()), None)
        if first is not None and first.is_cuda:
            self.compile_for(first.device, first.dtype)

    def compile_for(self, device: torch.device, dtype: torch.dtype) -> None:
        """Have the worker compile what the model's operands, of that dtype and on that device, will need."""
        self.is_busy = True

        def work() -> None:
            with kept_locally() as self.where:
                measure_zeros(device, dtype, self._config)
                score_zeros(device, dtype)

        def job() -> None:
            started = time.perf_counter()
            try:
                self._worker.aside(device, [], work)
            finally:
                self.took_ms = (time.perf_counter() - started) * 1e3
                self.is_busy = False
            self._tell(Event("kernels", "", "ready", {"took_ms": self.took_ms}, self.words()))

        self._worker.put(job)

    def status(self) -> dict[str, Any]:
        return {"kernels": self.words(), "kernels_ms": self.took_ms}

    def words(self) -> str:
        """ "" where nothing is compiled, or is not yet."""
        if self.is_busy:
            return "being compiled; no step is probed before"
        if self.took_ms is None:
            return ""
        where = f"; Triton's are in {self.where}" if self.where else ""
        return f"ready after {self.took_ms / 1e3:.1f} s, in which no step was probed{where}"


@contextmanager
def kept_locally() -> Generator[str, None, None]:
    """What this thread compiles in it by Triton goes to the directory yielded; "" for where it would have gone."""
    if not has_triton():
        yield ""
        return
    from mxprobe_kernels.triton_cache import local_cache

    with local_cache() as directory:
        yield directory


def measure_zeros(device: torch.device, dtype: torch.dtype, config: AgentConfig) -> None:
    """All that is done with an operand, of each kind that comes: rows and columns of W, in its dtype and in float32."""
    for size in SIZES:
        for kind in dict.fromkeys((dtype, torch.float32)):
            a = torch.zeros(1, size, size, dtype=kind, device=device)
            for role, each in ((Role.W_FWD, a), (Role.W_DGRAD, a.mT)):
                measured = measure_operand(
                    Operand(role, each, a[..., :32], 1.0, size), format=config.format, rule=config.rule
                )
                for _ in measure_corrections([measured], config.whatifs):
                    pass


def score_zeros(device: torch.device, dtype: torch.dtype) -> None:
    """What the training thread does with logits, which must not compile there: rows of them, as they come."""
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    for width in VOCABULARIES:
        for kind in dict.fromkeys((dtype, torch.float32)):
            token_statistics(torch.zeros(2, width, dtype=kind, device=device), tokens)
