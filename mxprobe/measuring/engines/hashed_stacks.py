"""Rows of a trainer's fused experts, copied to be hashed: of every expert, at every version that the agent keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from mxprobe.measuring.adapters.expert_numbers import own_experts
from mxprobe.measuring.adapters.expert_structure import expert_parameters
from mxprobe.measuring.engines.expert_parts import Part, parts_of
from mxprobe.measuring.engines.fingerprints import features_of, version_rows
from mxprobe.measuring.isolation import is_plain, undisturbed
from mxprobe.measuring.sampling import spread
from mxprobe.schema import Row

HASHED_ELEMENTS = 1 << 18
"""Elements of each of gate, up and down in one layer: one row each of 128 experts of 2,048 features."""


class HashedStack(NamedTuple):
    """Copies of some rows of one part of all experts; hashed by the worker."""

    module: str
    step: int
    """Since attach."""
    part: Part
    features: list[int]
    """Row o of expert e of the whole model as e O + o, ascending."""
    shape: tuple[int, int, int]
    """[experts of this rank, O, K]"""
    values: torch.Tensor
    """[n, K]"""

    def table_rows(self) -> Iterator[Row]:
        """Yield rows of table `weight_codes`."""
        name = f"{self.module}.{self.part.name}"
        return version_rows(name, self.part.reading, self.shape, self.features, self.values, step=self.step)


def copy_stacks(step: int, name: str, module: nn.Module, first: int) -> list[HashedStack]:
    """Copy this rank's experts, numbered from `first`; in the training thread, without waiting for the device.

    Fewer rows than an engine hashes of each expert, and of experts that do not fit some: the same ones at every step.
    """
    parameters, found = expert_parameters(module), list[HashedStack]()
    for part in parts_of(module):
        own = own_experts(parameters[part.parameter], first)
        if own is None or not is_plain(own[0]):
            continue
        stored, number = own[0].detach(), own[1]
        w = stored.mT if part.is_turned else stored
        experts, features = _chosen(len(w), part.size, w.shape[2])
        with undisturbed(w.device.type):
            on_device = _chosen(len(w), part.size, w.shape[2], w.device)
            at = on_device[0].repeat_interleave(len(features)), part.rows(on_device[1]).repeat(len(experts))
            values = w[at]
        numbers = [(number + e) * part.size + o for e in experts.tolist() for o in features.tolist()]
        found.append(HashedStack(name, step, part, numbers, (len(w), part.size, w.shape[2]), values))
    return found


def _chosen(n_experts: int, n_out: int, n_in: int, device: torch.device | None = None) -> tuple[torch.Tensor, ...]:
    """Return int64 experts of the rank, and rows of each among its `features_of`."""
    fitting = max(HASHED_ELEMENTS // max(n_in, 1), 1)
    n = min(n_experts, fitting)
    features = features_of(n_out, n_in, device)
    rows = spread(min(max(fitting // n, 1), len(features)), len(features), device)
    return spread(n, n_experts, device), features[rows]
