"""TransformerEngine's `GroupedLinear` under observation: one call over (expert, rows), with an own weight for each.

    y_e = x_e W_e^T     rows of e: the m_splits[e] rows of x behind those of the experts before it

What the module is given and returns are the operands of all experts' GEMMs at once, so that no call has to be watched:
a forward hook and a tensor hook on the output, as for a Linear. Counts that are a tensor are read on its device.
Not verified on a GPU.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from mxprobe.agent.probes.many_experts import ManyExpertsProbe
from mxprobe.measuring.adapters.adapter import Reading
from mxprobe.measuring.adapters.transformer_engine import experts_of_grouped, splits_of
from mxprobe.measuring.isolation import is_plain, undisturbed
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot, copy_gemm, on_device
from mxprobe.measuring.moe.gemm import Gemm
from mxprobe.schema import Phase


class GroupedProbe(ManyExpertsProbe):
    """Copies rows of the experts that are measured; the snapshot is that of fused experts."""

    def __init__(self, name: str, module: nn.Module, **options: Any) -> None:
        """The options are those of `ManyExpertsProbe`."""
        self._splits: Any = None
        super().__init__(name, module, **options)

    def _on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._splits = splits_of(args, kwargs)
        try:
            super()._on_call(args, kwargs, output)
        finally:
            self._splits = None

    def _snapshot(self, reading: Reading, phase: Phase) -> Any:
        weights, biases = experts_of_grouped(self.module)
        if not all(is_plain(each) for each in weights):
            self.why_unread = "its weights are no plain tensors, and their optimizer keeps no whole master of them"
            return None
        assert reading.y is not None  # the adapter reads none without
        x, y = (t.reshape(-1, t.shape[-1]) for t in (reading.x, reading.y))
        with undisturbed(x.device.type):
            shape = weights[0].detach().expand(len(weights), *weights[0].shape)
            layout = self._layout(shape, self.first_expert)
            gemm = Gemm(
                expert=None,
                experts=None,
                offsets=_ends(self._splits, x.device),
                x=x,
                is_flipped=False,
                is_copy=False,
                n_features=y.shape[-1],
                bias=None,
                output=y,
                rows_of=_rows,
            )
            copied = copy_gemm(gemm, layout, weights, biases)
            if copied is None:
                return None
        return ExpertsSnapshot(
            module=self.name,
            phase=phase.value,
            step=self._clock.step,
            micro_step=max(self._clock.micro_step, 0),
            time_ns=time.time_ns(),
            with_operands=self._with_operands(phase),
            with_weights=self._clock.with_weights,
            layout=layout,
            pieces=[copied[0]],
            n_rows=x.shape[0],
            all_counts=copied[1],
            dtype=y.dtype,
        )


def _ends(splits: Any, device: torch.device) -> torch.Tensor:
    """int64 [E]: where the rows of each expert end."""
    if isinstance(splits, torch.Tensor):
        return splits.to(device, torch.int64, non_blocking=True).cumsum(0)
    return on_device(list(accumulate(int(n) for n in splits)), device)


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1])
