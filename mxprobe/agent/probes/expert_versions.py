"""The weights of fused experts as of a step.

For `updates` (do the optimizer's steps reach the quantized experts?) output features of every expert are watched,
evenly spaced over all of them: the rows of one matrix [F, K]. For `weight_codes` (whose weights does an engine hold?)
those of every expert are copied that an engine hashes too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mxprobe.agent.probes.experts_probe import ExpertsProbe
from mxprobe.measuring.adapters.expert_structure import expert_parameters
from mxprobe.measuring.engines.hashed_stacks import HashedStack, copy_stacks
from mxprobe.measuring.isolation import is_plain, undisturbed
from mxprobe.measuring.operands.snapshot import event_now
from mxprobe.measuring.operands.weights import WATCHED_BYTES
from mxprobe.measuring.sampling import spread
from mxprobe.measuring.versions.weight_history import Copies, Version

WATCHED_TIMES = 4
"""As many bytes as of so many Linears: a layer's experts stand for three of them, and there are many."""


def copy_expert_versions(step: int, probes: Iterable[ExpertsProbe]) -> list[Copies]:
    """The current weights of the watched features; at a step boundary, in the training thread. No waiting.

    Parameters whose layout no GEMM has shown yet are left out of those for `updates`.
    """
    by_device: dict[torch.device, dict[str, Version]] = {}
    stacks: dict[torch.device, list[HashedStack]] = {}
    seen: set[int] = set()
    for probe in probes:
        if id(probe.module) not in seen:
            seen.add(id(probe.module))
            for stack in copy_stacks(step, probe.name.removesuffix(f".{probe.part}"), probe.module, probe.first_expert):
                stacks.setdefault(stack.values.device, []).append(stack)
        parameter = expert_parameters(probe.module).get(probe.part)
        if parameter is None or not is_plain(parameter) or probe.is_flipped is None:
            continue
        with undisturbed(parameter.device.type):
            watched = watched_features(parameter.mT if probe.is_flipped else parameter)
        by_device.setdefault(parameter.device, {})[probe.name] = Version(step, watched, None)
    return [
        Copies(by_device.get(device, {}), device, event_now(device), stacks=stacks.get(device, ()))
        for device in {**by_device, **stacks}
    ]


def watched_features(weight: torch.Tensor) -> torch.Tensor:
    """W [E, O, K] -> a copy [F, K] of F of its E O rows, at least one of each expert."""
    n_experts, out_features, in_features = weight.shape
    total = n_experts * out_features
    fitting = WATCHED_TIMES * WATCHED_BYTES // max(in_features * weight.element_size(), 1)
    n = min(max(fitting, n_experts), total)
    index = spread(n, total, weight.device)
    return weight.detach()[index // out_features, index % out_features]
