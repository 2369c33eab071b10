"""Counterfactual forwards of one captured microbatch: what the policy would be if the Linears rounded otherwise.

    high        the exact operands, float32 products: the reference of every other arm
    q           Q(x): the format and scale rule as they are
    qstar       Q*(x): ideal scale
    qstar_dz    Q*(x) with the deadzone D restored: x where Q*(x) = 0
    noise       x + Gaussian noise of the energy of Q(x) - x, row by row: is it the error's structure or its size?
    flip        x - (Q(x) - x): the error with the other sign
    q_routed    as q, each router's choice of experts that of `high`: what routing replay would leave. Forwards only
    q_weights   the model at w = Q(w): exact products of rounded weights, forwards and backwards
    mxfp8, nvfp4, of:0.5, mbs:128, ...    any correction of `mxprobe_kernels.formats`

The sequential split of a metric M (KL to `high`) adds up to 1, which effects of single components do not, because
e_scale and e_grid point against each other:

    scale = (M(q) - M(qstar)) / M(q)    deadzone = (M(qstar) - M(qstar_dz)) / M(q)    grid = M(qstar_dz) / M(q)

Products are float32 without autocast in every arm, because bfloat16 cannot hold Q*. All arms start from the same
random state: differences are paired.

Given the gradient of the run's loss at the policy, each arm runs backwards from it as well, all six operands of a
Linear rounded as the arm says (`backward`): what rounding does to every weight gradient, of which the same split and
controls are taken. The gradient at the policy is the run's in every arm. No parameter's `.grad` is touched.

`q_weights` is another point, not another arithmetic: with it come L(Q(w)) - L(w) and <grad L at Q(w), w - Q(w)>, which
say whether Q(w) has left the basin of w and whether a straight-through step leads back (arXiv 2606.09012).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.replay.backward import GradientSums, Layer, RoundedLinear, WeightGradients
from mxprobe.measuring.replay.captured_call import Call, forward_policy, replayed
from mxprobe.measuring.replay.expert_forwards import RoutingReplay
from mxprobe.measuring.replay.interception import Product, intercepted
from mxprobe.measuring.replay.policy_output import PolicyGradient, PolicyOutput, chosen, draw_tokens, entropy_of
from mxprobe.measuring.replay.representation import Representation
from mxprobe.schema import DEFAULT_ARMS, Role, Row
from mxprobe_kernels.recipe_grammar import Correction

HIGH = "high"
SEQUENCE = ("q", "qstar", "qstar_dz")
CONTROLS = ("noise", "flip")
Q_WEIGHTS = "q_weights"
ROUTED = "q_routed"
EXACT, K3 = "exact", "k3"
MAX_REFERENCE = 1 << 26
"""Elements of the reference log-probabilities that are kept; samples over it are left out."""

FORWARD_ROLES = (Role.X_FWD, Role.W_FWD)
BACKWARD_ROLES = (Role.G_DGRAD, Role.W_DGRAD, Role.G_WGRAD, Role.X_WGRAD)

Quantize = Callable[[torch.Tensor, int], torch.Tensor]
"""(x [rows, C], seed) -> x as the arm has it, blocks along the last axis, float32."""


def quantizer(arm: str, *, format: str = "mxfp4", rule: str = "rceil") -> Quantize:
    """Return the arm's effect on an operand. ValueError for an unknown arm, naming the known ones."""
    if arm == HIGH:
        return lambda x, seed: x.float()
    if arm in (Q_WEIGHTS, ROUTED):
        return quantizer("q", format=format, rule=rule)
    if arm in SEQUENCE or arm in CONTROLS:
        return lambda x, seed: _from_fields(arm, x, seed, format, rule)
    try:
        correction = Correction.parse(arm)
    except ValueError as error:
        known = ", ".join(dict.fromkeys((*DEFAULT_ARMS, *SEQUENCE, *CONTROLS, Q_WEIGHTS, ROUTED)))
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


_SEED_OF_ROLE = {role: i for i, role in enumerate((Role.W_FWD, Role.X_FWD, *BACKWARD_ROLES))}


def arm_product(
    quantize: Quantize,
    *,
    only: Collection[tuple[str, Role]] | None = None,
    seed: int = 0,
    gradients: WeightGradients | None = None,
    at: Quantize | None = None,
) -> Product:
    """Return the product of a Linear under an arm: Q(x) Q(W)^T + b, float32, returned in the layer's own dtype.

    only: the (module, role) whose operands the arm changes; all if None. W's control noise depends on the module and
    `seed` alone: the error of W is a fixed bias, so its control is frozen too. gradients: where the weight gradients
    of trained modules go in a backward pass for its anchors. at: what the weights themselves become, in every product.
    """
    weights: dict[str, torch.Tensor] = {}

    def product(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        noise_seed = zlib.crc32(name.encode()) ^ seed

        def rounds(role: Role, operand: torch.Tensor) -> torch.Tensor:
            changes = only is None or (name, role) in only
            return quantize(operand, noise_seed + _SEED_OF_ROLE[role]) if changes else operand.float()

        w, bias = module.weight.detach(), _detached(module.bias)
        if name not in weights:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                moves = at is not None and (only is None or (name, Role.W_FWD) in only)
                weights[name] = at(w, noise_seed) if at is not None and moves else rounds(Role.W_FWD, w)
                if at is not None and gradients is not None:
                    gradients.keep_step(name, w - weights[name])
        if at is not None:
            w = weights[name]
        wanted = gradients if gradients is not None and module.weight.requires_grad else None
        anchor = None
        if wanted is not None and torch.is_grad_enabled():
            anchor = wanted.anchor(x.device)
        elif wanted is not None:
            wanted.unreached.add(name)
        return RoundedLinear.apply(x, anchor, Layer(name, w, bias, weights[name], rounds, wanted))

    return product


def _detached(bias: Any) -> Any:
    return None if bias is None else bias.detach()


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


_VALUES = (
    *("n_tokens", "sum_kl", "sum_log_prob_shift", "sum_log_prob_shift2"),
    *("sum_entropy_shift", "loss_shift", "policy_loss_shift"),
)
_GRADIENT_VALUES = ("ref2", "err2", "ref_err", "sum_grad_step", "sum_step2")
_NO_POINT: Row = {"sum_grad_step": None, "sum_step2": None}


class Arm(NamedTuple):
    """One arm's sums over the counted tokens, on the device until `row`."""

    name: str
    estimator: str
    """`exact` from logits, `k3` (exp d - 1 - d, d = log p_arm - log p_high of the run's tokens) otherwise."""
    values: torch.Tensor
    """float64 [7]: n_tokens, KL(high || arm), d, d^2, entropy - entropy of high, loss - loss of high, and that of the
    run's own loss, to first order in the policy."""
    gradients: tuple[GradientSums, ...] = ()
    """One a module; none where the gradient at the policy is not known or does not reach the Linears."""
    representation: Representation | None = None
    """Errors of the Linears' outputs under arm `q`."""
    is_whole: torch.Tensor | None = None
    """bool: the forward was the arm's; None where that was never in doubt."""

    @property
    def holds(self) -> bool:
        """Say whether its numbers are valid; waits for the device."""
        return self.is_whole is None or bool(self.is_whole)

    def row(self) -> Row:
        """Return a row of table `replays` without when; copies from the device, which waits for it."""
        return {"arm": self.name, "estimator": self.estimator, **dict(zip(_VALUES, self.values.tolist()))}

    def gradient_rows(self) -> Iterator[Row]:
        """Yield rows of table `replay_gradients` without when; one copy from the device."""
        if not self.gradients:
            return
        values = torch.stack([each.values.cpu() for each in self.gradients]).tolist()
        for (module, sampled_frac, _), sums in zip(self.gradients, values):
            shared = {"arm": self.name, "module": module, "sampled_frac": sampled_frac}
            yield {**shared, **_NO_POINT, **dict(zip(_GRADIENT_VALUES, sums))}


def replay_arms(
    call: Call,
    modules: Mapping[str, nn.Linear],
    arms: Sequence[str] = DEFAULT_ARMS,
    *,
    mask: torch.Tensor | None = None,
    gradient: PolicyGradient | None = None,
    only: Collection[tuple[str, Role]] | None = None,
    format: str = "mxfp4",
    rule: str = "rceil",
    seed: int = 0,
) -> Iterator[Arm]:
    """Run the call once per arm (and once for `high`, always), all Linears of `modules` rounding as the arm says.

    Arm `q_routed` is left out where a router cannot be given another choice.

    mask: [B, T] of the positions that count; all of them if None. gradient: that of the run's loss at the policy; with
    it every arm runs backwards too. only: see `arm_product`. ValueError for an unknown arm; NotReplayableError where
    the model returns no policy.
    """
    quantizers = {arm: quantizer(arm, format=format, rule=rule) for arm in arms}
    high = None if gradient is None else WeightGradients(modules)
    representation, product = Representation(modules), arm_product(quantizer(HIGH), gradients=high)
    product = representation.of_high(product) if "q" in arms else product
    routing = RoutingReplay(call.module)
    with routing.recording():
        output = run_arm(call, modules, product, gradient, high)
    reference = _reference(call, output, mask, seed)
    estimator = EXACT if reference.log_probs is not None else K3
    for arm, quantize in quantizers.items():
        if arm == ROUTED:
            output = _routed(call, modules, arm_product(quantize, only=only, seed=seed), routing)
            if output is not None and (is_whole := routing.is_whole) is not None:
                yield Arm(arm, estimator, _compare(reference, output, None), is_whole=is_whole)
            continue
        found = None if high is None or not high.of else WeightGradients(modules)
        at = quantize if arm == Q_WEIGHTS else None
        rounded = quantize if at is None else quantizer(HIGH)
        product = arm_product(rounded, at=at, only=only, seed=seed, gradients=found)
        product = representation.of_arm(product) if arm == "q" else product
        output = run_arm(call, modules, product, gradient, found)
        sums = () if found is None or high is None else tuple(found.against(high, modules))
        if arm == "q":
            representation.close()
        errors = representation if arm == "q" else None
        yield Arm(arm, estimator, _compare(reference, output, gradient), sums, errors)


def _routed(
    call: Call, modules: Mapping[str, nn.Linear], product: Product, routing: RoutingReplay
) -> PolicyOutput | None:
    if not routing.is_possible:
        return None
    with routing.replaying():
        return run_arm(call, modules, product, None, None)


def run_arm(
    call: Call,
    modules: Mapping[str, nn.Linear],
    product: Product,
    gradient: PolicyGradient | None,
    gradients: WeightGradients | None,
) -> PolicyOutput:
    """Run the call with that product, and backwards from `gradient` into `gradients` where both are given."""
    with replayed(call, gradient=gradients is not None), intercepted(modules, product):
        policy = forward_policy(call)
        if gradient is not None and gradients is not None:
            _run_back(policy, gradient, gradients)
    return policy.detached()


def _run_back(policy: PolicyOutput, gradient: PolicyGradient, gradients: WeightGradients) -> None:
    """Fills `gradients`; leaves it empty where a region that is checkpointed reentrantly lies in the way."""
    outputs, at_outputs = gradient.pairs(policy)
    if not outputs or not gradients.anchors:
        return
    try:
        torch.autograd.grad(outputs, gradients.anchors, at_outputs, allow_unused=True)
    except RuntimeError:
        if not gradients.unreached:
            raise
        gradients.of.clear()


@torch.no_grad()
def _reference(call: Call, output: PolicyOutput, mask: torch.Tensor | None, seed: int) -> Reference:
    n = output.tensor.shape[0]
    if output.logits is not None:
        n = min(n, max(MAX_REFERENCE // max(output.logits[0].numel(), 1), 1))
    counted = output.counted(mask)[:n]
    if output.logits is None:
        entropy = None if output.entropy is None else output.entropy[:n].float()
        return Reference(n, None, output.tensor[:n].float(), None, entropy, counted, output.loss)
    log_probs = torch.log_softmax(output.logits[:n].float(), -1)
    tokens = call.tokens(output.logits.shape)
    if tokens is None:
        generator = torch.Generator(device=log_probs.device)
        generator.manual_seed(seed)
        tokens = draw_tokens(log_probs, generator)
    else:
        tokens = tokens[:n]
    counted = counted * (tokens >= 0)
    return Reference(n, log_probs, chosen(log_probs, tokens), tokens, entropy_of(log_probs), counted, output.loss)


@torch.no_grad()
def _compare(reference: Reference, output: PolicyOutput, gradient: PolicyGradient | None) -> torch.Tensor:
    n, counted = reference.samples, reference.counted
    unknown = torch.full_like(counted, float("nan"))
    entropy: torch.Tensor | None
    if reference.log_probs is not None and output.logits is not None and reference.tokens is not None:
        log_probs = torch.log_softmax(output.logits[:n].float(), -1)
        moved = log_probs - reference.log_probs
        kl = exact_kl(reference.log_probs, log_probs)
        shift = chosen(log_probs, reference.tokens) - reference.of_tokens
        entropy = entropy_of(log_probs)
    else:
        moved = shift = output.tensor[:n].float() - reference.of_tokens
        kl = shift.double().expm1() - shift.double()
        entropy = None if output.entropy is None else output.entropy[:n].float()
    entropy_shift = unknown if entropy is None or reference.entropy is None else entropy - reference.entropy
    sums = [(counted.double() * each.double()).sum() for each in (kl, shift, shift.square(), entropy_shift)]
    loss = unknown.sum() if output.loss is None or reference.loss is None else output.loss - reference.loss
    policy_loss = unknown.sum().double()
    if gradient is not None and n == output.tensor.shape[0]:
        # By log-probabilities in place of logits: the same for every loss of them, whose gradient sums to 0 over V.
        pairs = ((gradient.tensor, moved), (gradient.entropy, entropy_shift))
        parts = [torch.where(g != 0, g * d, 0.0).sum(dtype=torch.float64) for g, d in pairs if g is not None]
        policy_loss = torch.stack(parts).sum() if parts else policy_loss
    return torch.stack((counted.sum().double(), *sums, loss.double().reshape(()), policy_loss))


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) of each position, float64 [B, T], from logits or log-probabilities [B, T, V]."""
    return mxprobe_kernels.exact_kl(p.flatten(0, 1), q.flatten(0, 1)).reshape(p.shape[:2])
