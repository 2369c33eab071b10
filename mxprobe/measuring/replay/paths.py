"""The floor: the captured call again, its batch put together otherwise. What the order of summation alone does.

    floor        every Linear exact: of the policy (table `replays`, arm `floor`) and of each block (table `layers`)
    floor_own    the model's own forward: where it quantizes, a last bit may send values to other codes

Differences of rollout and trainer mean something as multiples of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from mxprobe.measuring.replay.arms import EXACT, HIGH, K3, Arm, arm_product, exact_kl, quantizer
from mxprobe.measuring.replay.call import Call, NotReplayableError, forward, is_by_sample, replayed, with_samples
from mxprobe.measuring.replay.linears import Intercept
from mxprobe.measuring.replay.policy import TOKEN_ARGUMENT, PolicyOutput, chosen, entropy_of, find_policy, given_tokens
from mxprobe.measuring.replay.residuals import Difference, Residuals, difference
from mxprobe.schema import Row

FLOOR, FLOOR_OWN = "floor", "floor_own"

Product = Callable[[str, nn.Linear, torch.Tensor], torch.Tensor]


class Run(NamedTuple):
    policy: PolicyOutput
    sketches: dict[str, torch.Tensor]
    """[n, k] per block."""
    dtype: torch.dtype


class Floor(NamedTuple):
    arm: Arm
    layers: dict[str, dict[str, Difference]]
    """Comparison -> block -> difference."""
    eps: float

    def rows(self) -> list[Row]:
        """Rows of table `layers` without when; waits for the device."""
        return [
            layer_row(name, depth, comparison, found, self.eps)
            for comparison, blocks in self.layers.items()
            for depth, (name, found) in enumerate(blocks.items())
        ]


def layer_row(name: str, depth: int, comparison: str, found: Difference, eps: float) -> Row:
    """A row of table `layers` without when; waits for the device."""
    return {
        "layer": name,
        "depth": depth,
        "comparison": comparison,
        "n_tokens": found.n_tokens,
        "ref2": float(found.ref2),
        "diff2": float(found.diff2),
        "median_frac": float(found.median_frac),
        "eps": eps,
    }


def measure_floor(call: Call, modules: Mapping[str, nn.Linear], *, mask: torch.Tensor | None = None) -> Floor:
    """Two forwards of the batch, two of it recomposed. NotReplayableError for a model that draws or has no policy."""
    if not is_by_sample(call.module):
        raise NotReplayableError("dropout or batch norm is on, which make of a sample what its batch is")
    exact: Product = arm_product(quantizer(HIGH))
    high = _run([call], modules, exact)
    parts = recomposed(call, high.policy.tensor.shape[0])
    other = _run(parts, modules, exact)
    own, own_other = _run([call], modules, None), _run(parts, modules, None)
    layers = {FLOOR: _differences(high, other), FLOOR_OWN: _differences(own, own_other)}
    return Floor(_policy_floor(call, high.policy, other.policy, mask), layers, torch.finfo(own.dtype).eps)


def recomposed(call: Call, n_batch: int) -> list[Call]:
    """The same samples in batches of other sizes: one alone and two parts, or a single one beside a copy of itself."""
    if n_batch == 1:
        return [with_samples(call, 1, lambda x: torch.cat((x, x)))]
    ends = sorted({0, 1, (n_batch + 1) // 2, n_batch})
    return [with_samples(call, n_batch, lambda x, at=slice(*part): x[at]) for part in zip(ends, ends[1:])]


def _run(calls: list[Call], modules: Mapping[str, nn.Linear], product: Product | None) -> Run:
    """The calls one after the other, their samples joined. Without a product the model's Linears do as they do."""
    outputs: list[PolicyOutput] = []
    sketches: dict[str, list[torch.Tensor]] = {}
    dtype = torch.float32
    for call in calls:
        with ExitStack() as stack:
            stack.enter_context(replayed(call, gradient=False))
            if product is not None:
                stack.enter_context(Intercept(modules, product))
            residuals = stack.enter_context(Residuals(call.module))
            policy = find_policy(forward(call))
        if policy is None:
            raise NotReplayableError("the model returns neither logits [B, T, V] nor log-probabilities")
        outputs.append(policy)
        dtype = residuals.dtype
        for name, sketch in residuals.sketches.items():
            sketches.setdefault(name, []).append(sketch)
    joined = outputs[0]
    if len(outputs) > 1:
        joined = PolicyOutput(*(_joined([each[field] for each in outputs]) for field in range(len(joined))))
    return Run(joined, {name: torch.cat(parts) for name, parts in sketches.items()}, dtype)


def _joined(parts: list[Any]) -> Any:
    return torch.cat(parts) if all(isinstance(part, torch.Tensor) and part.dim() for part in parts) else None


def _differences(a: Run, b: Run) -> dict[str, Difference]:
    found: dict[str, Difference] = {}
    for name, sketch in a.sketches.items():
        if name in b.sketches:
            n = min(len(sketch), len(b.sketches[name]))
            found[name] = difference(sketch[:n], b.sketches[name][:n])
    return found


@torch.no_grad()
def _policy_floor(call: Call, high: PolicyOutput, other: PolicyOutput, mask: torch.Tensor | None) -> Arm:
    """KL(high || high of the other batch) over the counted tokens."""
    read = high.label_mask if high.label_mask is not None else mask
    n = high.tensor.shape[0]
    counted = torch.ones(high.tensor.shape[:2], device=high.tensor.device) if read is None else read.float()
    entropy_shift = torch.full_like(counted, float("nan"))
    if high.logits is not None and other.logits is not None:
        kl, estimator = exact_kl(high.logits[:n], other.logits[:n]), EXACT
        p, q = (torch.log_softmax(logits[:n].double(), -1) for logits in (high.logits, other.logits))
        tokens = given_tokens(call.argument(TOKEN_ARGUMENT), high.logits.shape)
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


def layer_rows(found: list[tuple[str, int, Difference, float]]) -> list[Row]:
    """Rows of table `layers` without when; waits for the device. None where no token was found again."""
    rows = [layer_row(name, depth, GENERATION_TRAINING, made, eps) for name, depth, made, eps in found]
    return [row for row in rows if row["median_frac"] == row["median_frac"]]


GENERATION_TRAINING = "generation_training"
