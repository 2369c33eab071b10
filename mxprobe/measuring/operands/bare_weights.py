"""The weights of modules whose calls no hook sees (inside `torch.compile`): roles `w_fwd` and `w_dgrad`, no product.

Copied at a step boundary, after the optimizer has stepped. What the weights meet is not known: their output sums are
0, of nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.operands.operand import Operand
from mxprobe.measuring.operands.snapshot import Moment, event_now
from mxprobe.measuring.operands.weights import WeightSample, sample_weight
from mxprobe.measuring.sampling import seed_of
from mxprobe.schema import Phase, Role


@dataclass
class WeightsSnapshot(Moment):
    weight: WeightSample
    ready: Any = None
    """CUDA event after which the copies hold their values; None on the CPU."""

    @property
    def x(self) -> torch.Tensor:
        """One of the copies: it tells the device."""
        return self.weight.rows


class Unseen(Protocol):
    """A GEMM whose calls no hook sees."""

    name: str
    module: nn.Module
    part: str
    weights_alone: bool
    """Set once its weights were copied."""


def copy_weights(step: int, probes: Iterable[Unseen], max_features: int) -> Iterator[WeightsSnapshot]:
    """Of each probe whose module holds a plain two-dimensional weight; in the training thread, without waiting."""
    for probe in probes:
        device = next((p.device for p in probe.module.parameters(recurse=False)), torch.device("cpu"))
        with undisturbed(device.type):
            seed = seed_of(step, probe.name)
            weight = sample_weight(probe.module, max_features=max_features, seed=seed, part=probe.part)
        if weight is not None:
            probe.weights_alone = True
            yield WeightsSnapshot(
                module=probe.name,
                phase=Phase.TRAIN.value,
                step=step,
                micro_step=0,
                time_ns=time.time_ns(),
                weight=weight,
                ready=event_now(device),
            )


def weight_operands(weight: WeightSample) -> Iterator[Operand]:
    """W by rows and by columns, each with a partner of no column."""
    w, columns = weight.rows, weight.columns.T
    yield Operand(Role.W_FWD, w, w.new_zeros(w.shape[1], 0), weight.out_frac, w.shape[0])
    yield Operand(Role.W_DGRAD, columns, w.new_zeros(columns.shape[1], 0), weight.in_frac, columns.shape[0])
