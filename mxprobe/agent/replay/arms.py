"""Counterfactual forwards of one captured microbatch: what the policy would be if the Linears rounded otherwise.

    high        the exact operands, float32 products: the reference of every other arm
    q           Q(x): the format and scale rule as they are
    qstar       Q*(x): ideal scale
    qstar_dz    Q*(x) with the deadzone D restored: x where Q*(x) = 0
    noise       x + Gaussian noise of the energy of Q(x) - x, row by row: is it the error's structure or its size?
    flip        x - (Q(x) - x): the error with the other sign
    mxfp8, nvfp4, of:0.5, mbs:128, ...    any correction of `mxprobe_kernels.formats`

The sequential split of a metric M (KL to `high`) adds up to 1, which effects of single components do not, because
e_scale and e_grid point against each other:

    scale = (M(q) - M(qstar)) / M(q)    deadzone = (M(qstar) - M(qstar_dz)) / M(q)    grid = M(qstar_dz) / M(q)

Products are float32 without autocast in every arm, because bfloat16 cannot hold Q*. All arms start from the same
random state: differences are paired. No gradient is recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import mxprobe_kernels
from mxprobe.agent.replay.call import Call, NotReplayableError, forward, replayed
from mxprobe.agent.replay.linears import Intercept, Product
from mxprobe.agent.replay.policy import (
    TOKEN_ARGUMENT,
    PolicyOutput,
    chosen,
    draw_tokens,
    entropy_of,
    find_policy,
    given_tokens,
)
from mxprobe.schema import DEFAULT_ARMS, Role
from mxprobe_kernels.formats import Correction

HIGH = "high"
SEQUENCE = ("q", "qstar", "qstar_dz")
CONTROLS = ("noise", "flip")
EXACT, K3 = "exact", "k3"
MAX_REFERENCE = 1 << 26
"""Elements of the reference log-probabilities that are kept; samples over it are left out."""

FORWARD_ROLES = (Role.X_FWD, Role.W_FWD)

Row = dict[str, Any]
Quantize = Callable[[torch.Tensor, int], torch.Tensor]
"""(x [rows, C], seed) -> x as the arm has it, blocks along the last axis, float32."""


def quantizer(arm: str, *, format: str = "mxfp4", rule: str = "rceil") -> Quantize:
    """The arm's effect on an operand. ValueError for an unknown arm, naming the known ones."""
    if arm == HIGH:
        return lambda x, seed: x.float()
    if arm in SEQUENCE or arm in CONTROLS:
        return lambda x, seed: _from_fields(arm, x, seed, format, rule)
    try:
        correction = Correction.parse(arm)
    except ValueError as error:
        known = ", ".join(dict.fromkeys((*DEFAULT_ARMS, *SEQUENCE, *CONTROLS)))
        raise ValueError(f"unknown arm {arm!r}: arms are {known}, or a correction ({error})") from None
    return lambda x, seed: mxprobe_kernels.apply_correction(x, correction, rule=rule)


def _from_fields(arm: str, x: torch.Tensor, seed: int, format: str, rule: str) -> torch.Tensor:
    fields = mxprobe_kernels.error_fields(x, format=format, rule=rule)
    if arm == "q":
        return fields.q.float()
    if arm == "qstar":
        return fields.q_star.float()
    if arm == "qstar_dz":
        return torch.where(fields.on_d, fields.x, fields.q_star).float()
    if arm == "flip":
        return (fields.x - fields.e).float()
    generator = torch.Generator(device=x.device)
    generator.manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    size = fields.e.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return (fields.x + noise * size).float()


def arm_product(quantize: Quantize, *, only: Collection[tuple[str, Role]] | None = None, seed: int = 0) -> Product:
    """The product of a Linear under an arm: Q(x) Q(W)^T + b, float32, returned in the layer's own dtype.

    only: the (module, role) whose operands the arm changes; all if None. W's control noise depends on the module and
    `seed` alone: the error of W is a fixed bias, so its control is frozen too.
    """
    weights: dict[str, torch.Tensor] = {}

    def changes(name: str, role: Role) -> bool:
        return only is None or (name, role) in only

    def product(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        noise_seed = zlib.crc32(name.encode()) ^ seed
        with torch.autocast(x.device.type, enabled=False):
            if name not in weights:
                w = module.weight.detach()
                weights[name] = quantize(w, noise_seed) if changes(name, Role.W_FWD) else w.float()
            rows = x.reshape(-1, x.shape[-1])
            rows = quantize(rows, noise_seed + 1) if changes(name, Role.X_FWD) else rows.float()
            bias: Any = module.bias
            y = F.linear(rows, weights[name], None if bias is None else bias.float()).reshape(*x.shape[:-1], -1)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return y.to(dtype)

    return product


class Reference(NamedTuple):
    """The arm `high`, against which the others are held. B' samples kept."""

    samples: int
    log_probs: torch.Tensor | None
    """[B', T, V], or None where the model returns log-probabilities of its tokens."""
    of_tokens: torch.Tensor
    """[B', T] of the run's tokens, or of drawn ones where those are not known."""
    tokens: torch.Tensor | None
    entropy: torch.Tensor | None
    """[B', T]"""
    counted: torch.Tensor
    """[B', T] float32: 1 where the position counts."""
    loss: torch.Tensor | None


class Arm(NamedTuple):
    """One arm's sums over the counted tokens, on the device until `row`."""

    name: str
    estimator: str
    """`exact` from logits, `k3` (exp d - 1 - d, d = log p_arm - log p_high of the run's tokens) otherwise."""
    values: torch.Tensor
    """float64 [6]: n_tokens, KL(high || arm), d, d^2, entropy - entropy of high, loss - loss of high."""

    def row(self) -> Row:
        """A row of table `replays` without when; copies from the device, which waits for it."""
        names = ("n_tokens", "sum_kl", "sum_log_prob_shift", "sum_log_prob_shift2", "sum_entropy_shift", "loss_shift")
        return {"arm": self.name, "estimator": self.estimator, **dict(zip(names, self.values.tolist()))}


def replay_arms(
    call: Call,
    modules: Mapping[str, nn.Linear],
    arms: Sequence[str] = DEFAULT_ARMS,
    *,
    mask: torch.Tensor | None = None,
    only: Collection[tuple[str, Role]] | None = None,
    format: str = "mxfp4",
    rule: str = "rceil",
    seed: int = 0,
) -> Iterator[Arm]:
    """Run the call once per arm (and once for `high`, always), all Linears of `modules` rounding as the arm says.

    mask: [B, T] of the positions that count; all of them if None. only: see `arm_product`. ValueError for an unknown
    arm; NotReplayableError where the model returns no policy.
    """
    quantizers = {arm: quantizer(arm, format=format, rule=rule) for arm in arms}
    output = _run(call, modules, arm_product(quantizer(HIGH)))
    reference = _reference(call, output, mask, seed)
    for arm, quantize in quantizers.items():
        output = _run(call, modules, arm_product(quantize, only=only, seed=seed))
        yield Arm(arm, EXACT if reference.log_probs is not None else K3, _compare(reference, output))


def _run(call: Call, modules: Mapping[str, nn.Linear], product: Product) -> PolicyOutput:
    with replayed(call, gradient=False), Intercept(modules, product):
        policy = find_policy(forward(call))
    if policy is None:
        raise NotReplayableError("the model returns neither logits [B, T, V] nor log-probabilities")
    return policy


@torch.no_grad()
def _reference(call: Call, output: PolicyOutput, mask: torch.Tensor | None, seed: int) -> Reference:
    n = output.tensor.shape[0]
    read = output.label_mask if output.label_mask is not None else mask
    if output.logits is not None:
        n = min(n, max(MAX_REFERENCE // max(output.logits[0].numel(), 1), 1))
    shape = output.tensor.shape[:2]
    counted = (torch.ones(shape, device=output.tensor.device) if read is None else read.float())[:n]
    if output.logits is None:
        entropy = None if output.entropy is None else output.entropy[:n].float()
        return Reference(n, None, output.tensor[:n].float(), None, entropy, counted, output.loss)
    log_probs = torch.log_softmax(output.logits[:n].float(), -1)
    tokens = given_tokens(call.argument(TOKEN_ARGUMENT), output.logits.shape)
    if tokens is None:
        generator = torch.Generator(device=log_probs.device)
        generator.manual_seed(seed)
        tokens = draw_tokens(log_probs, generator)
    else:
        tokens = tokens[:n]
    counted = counted * (tokens >= 0)
    return Reference(n, log_probs, chosen(log_probs, tokens), tokens, entropy_of(log_probs), counted, output.loss)


@torch.no_grad()
def _compare(reference: Reference, output: PolicyOutput) -> torch.Tensor:
    n, counted = reference.samples, reference.counted
    unknown = torch.full_like(counted, float("nan"))
    entropy: torch.Tensor | None
    if reference.log_probs is not None and output.logits is not None and reference.tokens is not None:
        log_probs = torch.log_softmax(output.logits[:n].float(), -1)
        kl = (reference.log_probs.exp() * (reference.log_probs - log_probs)).sum(-1)
        shift = chosen(log_probs, reference.tokens) - reference.of_tokens
        entropy = entropy_of(log_probs)
    else:
        shift = output.tensor[:n].float() - reference.of_tokens
        kl = shift.double().expm1() - shift.double()
        entropy = None if output.entropy is None else output.entropy[:n].float()
    entropy_shift = unknown if entropy is None or reference.entropy is None else entropy - reference.entropy
    sums = [(counted.double() * each.double()).sum() for each in (kl, shift, shift.square(), entropy_shift)]
    loss = unknown.sum() if output.loss is None or reference.loss is None else output.loss - reference.loss
    return torch.stack((counted.sum().double(), *sums, loss.double().reshape(())))


def sequential_split(kl: Mapping[str, float]) -> dict[str, float]:
    """{"q", "qstar", "qstar_dz": KL} -> {"scale", "deadzone", "grid": share}, which sum to 1; NaN where KL(q) is 0."""
    whole = kl["q"]
    if not whole > 0:
        return dict.fromkeys(("scale", "deadzone", "grid"), float("nan"))
    return {
        "scale": (whole - kl["qstar"]) / whole,
        "deadzone": (kl["qstar"] - kl["qstar_dz"]) / whole,
        "grid": kl["qstar_dz"] / whole,
    }
