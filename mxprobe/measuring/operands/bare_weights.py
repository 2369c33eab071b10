"""The weights of modules whose calls no hook sees (inside `torch.compile`): roles `w_fwd` and `w_dgrad`, no product.

Copied at a step boundary, after the optimizer has stepped. What the weights meet is not known: the snapshots have no
row of X and none of G, and the output sums are 0, of nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import sample_weight
from mxprobe.measuring.sampling import seed_of
from mxprobe.schema import Phase


class Unseen(Protocol):
    """A GEMM whose calls no hook sees."""

    name: str
    module: nn.Module
    part: str
    weights_alone: bool
    """Set once its weights were copied."""


def copy_weights(step: int, probes: Iterable[Unseen], max_features: int) -> Iterator[Snapshot]:
    """Copy the weight of each probe whose module holds a plain matrix; in the training thread, without waiting."""
    for probe in probes:
        device = next((p.device for p in probe.module.parameters(recurse=False)), torch.device("cpu"))
        with undisturbed(device.type):
            seed = seed_of(step, probe.name)
            weight = sample_weight(probe.module, max_features=max_features, seed=seed, part=probe.part)
            if weight is None:
                continue
            probe.weights_alone = True
            snapshot = Snapshot(
                module=probe.name,
                phase=Phase.TRAIN.value,
                step=step,
                micro_step=0,
                time_ns=time.time_ns(),
                n_rows=0,
                x=weight.rows.new_zeros(0, weight.rows.shape[1]),
                weight=weight,
                with_operands=True,
                with_weights=True,
                gradient=weight.rows.new_zeros(0, weight.columns.shape[0]),
            )
            snapshot.mark_ready()
            yield snapshot
