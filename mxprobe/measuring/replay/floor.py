"""The floor: the captured call again, its batch put together otherwise. It shows what the order of summation does.

    floor        every Linear exact: of the policy (table `replays`, arm `floor`) and of each block (table `layers`)
    floor_own    the model's own forward: where it quantizes, a last bit may send values to other codes

Differences of rollout and trainer mean something as multiples of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.measuring.replay.arms import EXACT, HIGH, K3, Arm, arm_product, exact_kl, quantizer
from mxprobe.measuring.replay.captured_call import Call, forward_policy, is_by_sample, replayed, with_samples
from mxprobe.measuring.replay.interception import Product, intercepted
from mxprobe.measuring.replay.policy_output import PolicyOutput, chosen, entropy_of
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.measuring.replay.residual_stream import LayerDifference, difference, layer_rows, sketched
from mxprobe.schema import Row

FLOOR, FLOOR_OWN = "floor", "floor_own"


class Run(NamedTuple):
    policy: PolicyOutput
    sketches: dict[str, torch.Tensor]
    """[n, k] per block."""
    dtype: torch.dtype


class Floor(NamedTuple):
    arm: Arm
    layers: list[LayerDifference]

    def rows(self) -> list[Row]:
        """Return rows of table `layers` without when; waits for the device."""
        return layer_rows(self.layers)


def measure_floor(call: Call, modules: Mapping[str, nn.Linear], *, mask: torch.Tensor | None = None) -> Floor:
    """Run two forwards of the batch and two of it recomposed.

    NotReplayableError for a model that draws or has no policy.
    """
    if not is_by_sample(call.module):
        raise NotReplayableError("dropout or batch norm is on, which make of a sample what its batch is")
    exact = arm_product(quantizer(HIGH))
    high = _run([call], modules, exact)
    parts = recomposed(call, high.policy.tensor.shape[0])
    other = _run(parts, modules, exact)
    own, own_other = _run([call], modules, None), _run(parts, modules, None)
    eps = torch.finfo(own.dtype).eps
    layers = [*_differences(FLOOR, high, other, eps), *_differences(FLOOR_OWN, own, own_other, eps)]
    return Floor(_policy_floor(call, high.policy, other.policy, mask), layers)


def recomposed(call: Call, n_batch: int) -> list[Call]:
    """Return the same samples in batches of other sizes: one alone and two parts, or a single one beside its copy."""
    if n_batch == 1:
        return [with_samples(call, 1, lambda x: torch.cat((x, x)))]
    ends = sorted({0, 1, (n_batch + 1) // 2, n_batch})
    return [with_samples(call, n_batch, lambda x, at=slice(*part): x[at]) for part in zip(ends, ends[1:])]


def _run(calls: list[Call], modules: Mapping[str, nn.Linear], product: Product | None) -> Run:
    """Run the calls one after the other and join their samples. Without a product the Linears do as they do."""
    outputs: list[PolicyOutput] = []
    sketches: dict[str, list[torch.Tensor]] = {}
    dtype = torch.float32
    for call in calls:
        with ExitStack() as stack:
            stack.enter_context(replayed(call, gradient=False))
            if product is not None:
                stack.enter_context(intercepted(modules, product))
            found = stack.enter_context(sketched(call.module))
            outputs.append(forward_policy(call))
        dtype = found.dtype
        for name, sketch in found.of.items():
            sketches.setdefault(name, []).append(sketch)
    joined = outputs[0]
    if len(outputs) > 1:
        joined = PolicyOutput(*(_joined([each[field] for each in outputs]) for field in range(len(joined))))
    return Run(joined, {name: torch.cat(parts) for name, parts in sketches.items()}, dtype)


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if all(isinstance(part, torch.Tensor) and part.dim() for part in parts) else None


def _differences(comparison: str, a: Run, b: Run, eps: float) -> list[LayerDifference]:
    both = [name for name in a.sketches if name in b.sketches]
    n = {name: min(len(a.sketches[name]), len(b.sketches[name])) for name in both}
    return [
        LayerDifference(
            name, depth, comparison, difference(a.sketches[name][: n[name]], b.sketches[name][: n[name]]), eps
        )
        for depth, name in enumerate(both)
    ]


@torch.no_grad()
def _policy_floor(call: Call, high: PolicyOutput, other: PolicyOutput, mask: torch.Tensor | None) -> Arm:
    """Measure KL(high || high of the other batch) over the counted tokens."""
    n = high.tensor.shape[0]
    counted = high.counted(mask)
    entropy_shift = torch.full_like(counted, float("nan"))
    if high.logits is not None and other.logits is not None:
        kl, estimator = exact_kl(high.logits[:n], other.logits[:n]), EXACT
        p, q = (torch.log_softmax(logits[:n].double(), -1) for logits in (high.logits, other.logits))
        tokens = call.tokens(high.logits.shape)
        shift = torch.full_like(kl, float("nan"))
        if tokens is not None:
            counted = counted * (tokens >= 0)
            shift = chosen(q, tokens) - chosen(p, tokens)
        entropy_shift = entropy_of(q) - entropy_of(p)
    else:
        shift = other.tensor[:n].double() - high.tensor.double()
        kl, estimator = shift.expm1() - shift, K3
    sums = [(counted.double() * each.double()).sum() for each in (kl, shift, shift.square(), entropy_shift)]
    return Arm(FLOOR, estimator, torch.stack((counted.sum().double(), *sums, *sums[0].new_full((2,), float("nan")))))
