"""A router under observation: its GEMM as any other, and with it the experts that it chose."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

from torch import nn

from mxprobe.agent.probes.experts_probe import ExpertsProbe
from mxprobe.agent.probes.grouped_probe import GroupedProbe
from mxprobe.agent.probes.module_probe import ModuleProbe
from mxprobe.measuring.adapters.adapter import Reading
from mxprobe.measuring.adapters.expert_structure import expert_parameters, is_router
from mxprobe.measuring.adapters.families import adapter_of
from mxprobe.measuring.adapters.fused_experts import chosen_of
from mxprobe.measuring.adapters.transformer_engine import GroupedLinearAdapter
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.sampling import take
from mxprobe.schema import Phase


class RouterProbe(ModuleProbe):
    """Puts the choice of the sampled tokens into the snapshot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._output: Any = None
        super().__init__(*args, **options)

    def _on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._output = output
        try:
            super()._on_call(args, kwargs, output)
        finally:
            self._output = None

    def _snapshot(self, reading: Reading, phase: Phase) -> Snapshot | None:
        snapshot = super()._snapshot(reading, phase)
        chosen = chosen_of(self._output, reading.x.shape[0])
        if snapshot is not None and chosen is not None:
            with undisturbed(chosen.device.type):
                snapshot.chosen = take(chosen, snapshot.row_index)
        return snapshot


def probe_of(module: nn.Module, *, every_expert: bool, first_expert: int = 0) -> Callable[..., ModuleProbe]:
    """What watches the module: called with the arguments of `ModuleProbe`."""
    if isinstance(adapter_of(module), GroupedLinearAdapter):
        return partial(GroupedProbe, every_expert=every_expert, first_expert=first_expert)
    if expert_parameters(module):
        return partial(ExpertsProbe, every_expert=every_expert, first_expert=first_expert)
    return RouterProbe if is_router(module) else ModuleProbe
