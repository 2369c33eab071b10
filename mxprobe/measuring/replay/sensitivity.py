"""Delta2: how far the rounding error of one forward operand moves the policy, from one backward pass.

    J = sum over counted positions t of sum_v r_tv sqrt(p_tv) log p_tv          r random signs
    G = dJ / dY at every Linear's output
    delta_b = sum over rows of sample b of <G_row, (E_X W^T)_row>          for weights <G_row, (X E_W^T)_row>
    Delta2  = sum_b delta_b^2 / n_tokens  ~  E[(change of log p)^2],       KL(high || with E) ~ Delta2 / 2

To first order: measured against reruns in benchmarks/sensitivity.py. J's expectation over r is that over tokens drawn
from the policy, and has less variance than drawing them. Where the root returns log-probabilities of the run's
tokens, J is the sum of r_t log p_t. The gradients of the sum of log p of the run's tokens and of the entropy give
their signed shifts by the same products. A sample is a row of the batch; a Linear that sees another leading axis
(experts, packed sequences) has the microbatch as one sample: unbiased, and noisier.

S = samples measured, T = rows of a sample, K = in features, O = out features, J = directions, C = components.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

import mxprobe_kernels
from mxprobe.measuring.interruptions import is_of_a_signal_handler
from mxprobe.measuring.isolation import undisturbed
from mxprobe.measuring.replay.captured_call import Call, forward_policy, is_by_sample, replayed, with_samples
from mxprobe.measuring.replay.components import error_parts, with_total
from mxprobe.measuring.replay.interception import MAX_OUTPUT_BYTES, Recorded, intercepted
from mxprobe.measuring.replay.policy_output import TOKEN_ARGUMENT, PolicyOutput, chosen, entropy_of
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.schema import COMPONENTS, Role, Row

CPU_MAX_ROWS = 256
DEVICE_MAX_ROWS = 2048
"""Rows of whole samples that are replayed where the model takes samples one by one, and whose errors are propagated
in any case; at least one sample."""
MAX_LOGITS = 1 << 27
"""Elements of the logits of the samples measured."""
CHUNK_ELEMENTS = 1 << 20
"""Elements decomposed at a time: about 60 bytes each."""
_WHOLE_ONLY: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that do not take their batch in parts: to find out costs a forward pass, once."""

ErrorsOf = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, K] -> float32 [C - 1, rows, K]"""


@dataclass(frozen=True)
class _Plan:
    """The errors that are propagated, of which modules, and how much at once."""

    format: str
    rule: str
    corrections: tuple[str, ...]
    record: Collection[str]
    seed: int
    n_probes: int
    max_rows: int
    max_output_bytes: int

    def errors_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [C - 1, rows, K]: the parts of the error of x, and what each correction would leave of it.

        The total, their first component, is left out: it is the sum of the three parts. NVFP4 takes its tensor scale
        from the rows given.
        """
        fields = mxprobe_kernels.error_fields(x, format=self.format, rule=self.rule)
        parts = [error_parts(fields)]
        for correction in self.corrections:
            corrected = mxprobe_kernels.apply_correction(x, correction, rule=self.rule)
            parts.append(torch.where(corrected.isfinite(), corrected - fields.x, 0.0).float()[None])
        return torch.cat(parts)

    def generator(self, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device=device)
        generator.manual_seed(self.seed)
        return generator


@dataclass(frozen=True)
class Sensitivity:
    """Sums over one microbatch, on its device until `rows`."""

    operands: tuple[tuple[str, Role], ...]
    components: tuple[str, ...]
    sums: torch.Tensor
    """float64 [n_operands, C, P + 2]: sum_b delta_b^2 of each of P probes, summed shift of log p, of entropy."""
    n_samples: tuple[int, ...]
    """One of each operand."""
    n_tokens: torch.Tensor
    """float64 [], counted tokens of the samples measured."""
    skipped: frozenset[str]
    """Modules whose outputs did not fit; measure them with another call."""
    unreached: frozenset[str]
    """Modules that were called without gradient (frozen below them, or reentrant activation checkpointing)."""

    def rows(self) -> Iterator[Row]:
        """Yield one row per operand, component and probe, without when; copies from the device, which waits for it."""
        values, n_tokens = self.sums.tolist(), float(self.n_tokens)
        for (module, role), n_samples, of_operand in zip(self.operands, self.n_samples, values):
            for component, (*probes, log_prob, entropy) in zip(self.components, of_operand):
                for probe, delta2 in enumerate(probes):
                    yield {
                        "module": module,
                        "role": role.value,
                        "component": component,
                        "probe": probe,
                        "n_tokens": n_tokens,
                        "n_samples": n_samples,
                        "sum_delta2": delta2,
                        "sum_log_prob_shift": log_prob,
                        "sum_entropy_shift": entropy,
                    }


def measure_sensitivity(
    call: Call,
    modules: Mapping[str, nn.Linear],
    *,
    mask: torch.Tensor | None = None,
    record: Collection[str] | None = None,
    format: str = "mxfp4",
    rule: str = "rceil",
    corrections: Sequence[str] = (),
    seed: int = 0,
    n_probes: int = 1,
    max_rows: int | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    in_parts_only: bool = False,
) -> Sensitivity:
    """Replay the call with gradient and propagate the error of X and of W of each module.

    mask: [B, T] of the positions that count (the loss reads them); all of them if None. record: names of the modules
    to measure, all if None; the others are replayed in high precision too. corrections: what would be left of the
    error under each is propagated as well, as a further component of that name (a second quantizer's time each).
    NotReplayableError where the root returns no policy, or no Linear's output carries a gradient. ValueError for an
    unknown correction. Nothing waits for the device. `in_parts_only`: the whole batch would not fit.
    """
    max_rows = max_rows or (CPU_MAX_ROWS if call.device_type == "cpu" else DEVICE_MAX_ROWS)
    plan = _Plan(format, rule, tuple(corrections), record or modules, seed, n_probes, max_rows, max_output_bytes)
    few, few_mask = _few_samples(call, mask, plan)
    if few is call:
        return _measure(call, modules, mask, plan)
    try:
        return _measure(few, modules, few_mask, plan)
    except (NotReplayableError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # the model does not take its batch in parts
        if is_of_a_signal_handler(error):
            raise
        if in_parts_only:
            raise NotReplayableError("the model does not take its batch in parts, and whole it is too large") from None
    found = _measure(call, modules, mask, plan)
    _WHOLE_ONLY.add(call.module)
    return found


def _measure(call: Call, modules: Mapping[str, nn.Linear], mask: torch.Tensor | None, plan: _Plan) -> Sensitivity:
    with ExitStack() as stack:
        stack.enter_context(replayed(call, gradient=True))
        recordings = stack.enter_context(intercepted(modules, record=plan.record, max_bytes=plan.max_output_bytes))
        policy = forward_policy(call)
        if not recordings.calls:
            raise NotReplayableError("no Linear's output carries a gradient (reentrant activation checkpointing)")
        n_batch = policy.tensor.shape[0]
        generator = plan.generator(policy.tensor.device)
        samples = _choose_samples(recordings.calls, policy, plan.max_rows, generator)
        objectives, n_tokens = _objectives(call, policy, mask, samples, generator, plan.n_probes)
        gradients = _gradients(objectives, recordings.calls)
        with undisturbed(call.device_type):
            deltas = _propagate(recordings.calls, gradients, n_batch, samples, plan.errors_of)
    if not deltas:
        raise NotReplayableError("the policy does not depend on any of the modules")
    known = [any(g is not None for g in of_objective) for of_objective in gradients]
    return Sensitivity(
        operands=tuple(deltas),
        components=(*COMPONENTS, *plan.corrections),
        sums=torch.stack([_sums(delta, known) for delta in deltas.values()]),
        n_samples=tuple(delta.shape[-1] for delta in deltas.values()),
        n_tokens=n_tokens,
        skipped=frozenset(recordings.skipped),
        unreached=frozenset(recordings.unreached),
    )


def can_be_cut(call: Call) -> bool:
    """Say whether some of its samples can be replayed without the others, as far as can be known beforehand."""
    ids = call.argument(TOKEN_ARGUMENT)
    is_known = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] != ids.shape[1]
    return is_known and is_by_sample(call.module) and call.module not in _WHOLE_ONLY


def _few_samples(call: Call, mask: torch.Tensor | None, plan: _Plan) -> tuple[Call, torch.Tensor | None]:
    """Return the call with as many samples as are measured, drawn at random; unchanged where it cannot be cut.

    Samples are the rows of the token ids, which must be told from other arguments by their number alone.
    """
    ids = call.argument(TOKEN_ARGUMENT)
    if not can_be_cut(call):
        return call, mask
    n_batch, n = ids.shape[0], max(plan.max_rows // max(ids.shape[1], 1), 1)
    if n >= n_batch or (mask is not None and mask.shape[0] != n_batch):
        return call, mask
    kept = torch.randperm(n_batch, generator=plan.generator(ids.device), device=ids.device)[:n].sort().values
    few = with_samples(call, n_batch, lambda x: x.index_select(0, kept.to(x.device)))
    return few, None if mask is None else mask.index_select(0, kept.to(mask.device))


def _choose_samples(
    calls: Sequence[Recorded], policy: PolicyOutput, max_rows: int, generator: torch.Generator
) -> torch.Tensor:
    """Return sorted indices of the samples measured."""
    n_batch = policy.tensor.shape[0]
    rows = max((c.x.shape[1] for c in calls if c.x is not None and c.x.dim() == 3), default=policy.tensor.shape[1])
    n = max_rows // max(rows, 1)
    if policy.logits is not None:
        n = min(n, MAX_LOGITS // max(policy.logits[0].numel(), 1))
    order = torch.randperm(n_batch, generator=generator, device=generator.device)
    return order[: max(n, 1)].sort().values


def _objectives(
    call: Call,
    policy: PolicyOutput,
    mask: torch.Tensor | None,
    samples: torch.Tensor,
    generator: torch.Generator,
    n_probes: int,
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Return what is differentiated: n_probes signed sums, sum of log p, sum of entropies; None where not known."""
    counted = policy.counted(mask).index_select(0, samples)
    picked = policy.tensor.index_select(0, samples).float()
    if policy.logits is not None:
        log_probs = torch.log_softmax(picked, -1)
        spread = log_probs.detach().mul(0.5).exp()
        entropy: torch.Tensor | None = entropy_of(log_probs)
        tokens = call.tokens(policy.logits.shape)
        of_run = None
        if tokens is not None:
            tokens = tokens.index_select(0, samples)
            of_run = chosen(log_probs, tokens) * (tokens >= 0)
    else:
        log_probs = of_run = picked
        spread = None
        entropy = None if policy.entropy is None else policy.entropy.index_select(0, samples).float()
    found: list[torch.Tensor | None] = []
    for _ in range(n_probes):
        signs = torch.randint(0, 2, log_probs.shape, generator=generator, device=counted.device) * 2.0 - 1.0
        signed = signs * log_probs if spread is None else (signs * spread * log_probs).sum(-1)
        found.append((counted * signed).sum())
    for values in (of_run, entropy):
        found.append(None if values is None or not values.requires_grad else (counted * values).sum())
    return found, counted.sum().double()


def _gradients(
    objectives: Sequence[torch.Tensor | None], calls: Sequence[Recorded]
) -> list[Sequence[torch.Tensor | None]]:
    """Return for each objective the gradient at each call's output; None throughout where there is no objective."""
    edges = [call.edge for call in calls]
    last = max(i for i, objective in enumerate(objectives) if objective is not None)
    found: list[Sequence[torch.Tensor | None]] = []
    for i, objective in enumerate(objectives):
        if objective is None:
            found.append([None] * len(edges))
        else:
            found.append(torch.autograd.grad(objective, edges, retain_graph=i != last, allow_unused=True))
    return found


def _propagate(
    calls: Sequence[Recorded],
    gradients: list[Sequence[torch.Tensor | None]],
    n_batch: int,
    samples: torch.Tensor,
    errors_of: ErrorsOf,
) -> dict[tuple[str, Role], torch.Tensor]:
    """Return delta_b of each operand, [J, C - 1, S]; the same weight called twice adds up."""
    deltas: dict[tuple[str, Role], torch.Tensor] = {}
    for i, call in enumerate(calls):
        found = [of_objective[i] for of_objective in gradients]
        if call.x is None or all(g is None for g in found):
            continue
        x = _by_sample(call.x, n_batch, samples).float()
        here = [None if g is None else _by_sample(g, n_batch, samples).float() for g in found]
        nothing = next(torch.zeros_like(g) for g in here if g is not None)
        g = torch.stack([nothing if each is None else each for each in here])
        weight = call.module.weight.detach().float()
        for role, delta in (
            (Role.X_FWD, _input_deltas(x, weight, g, errors_of)),
            (Role.W_FWD, _weight_deltas(x, weight, g, errors_of)),
        ):
            place = (call.name, role)
            before = deltas.get(place)
            if before is not None and before.shape != delta.shape:  # called with several leading axes
                before, delta = before.sum(-1, keepdim=True), delta.sum(-1, keepdim=True)
            deltas[place] = delta if before is None else before + delta
    return deltas


def _sums(delta: torch.Tensor, known: Sequence[bool]) -> torch.Tensor:
    """Reduce [J, C - 1, S] to [C, J]: squares of the probes, sums of the last two directions, NaN if not known."""
    delta = with_total(delta, 1).double()
    n_probes = delta.shape[0] - 2
    columns = [delta[j].square().sum(-1) for j in range(n_probes)]
    for j in (n_probes, n_probes + 1):
        columns.append(delta[j].sum(-1) if known[j] else torch.full_like(columns[0], float("nan")))
    return torch.stack(columns, -1)


def _by_sample(x: torch.Tensor, n_batch: int, samples: torch.Tensor) -> torch.Tensor:
    """Return [S, T, K] of the chosen samples of [..., K]; [1, rows, K] where rows are not ordered by sample."""
    if x.dim() >= 3 and x.shape[0] == n_batch:
        return x.reshape(n_batch, -1, x.shape[-1]).index_select(0, samples)
    return x.reshape(1, -1, x.shape[-1])


def _input_deltas(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, errors_of: ErrorsOf) -> torch.Tensor:
    """Return delta_b [J, C - 1, S] of E_X from x [S, T, K], w [O, K], g [J, S, T, O]: <G, E_X W^T> = <G W, E_X>."""
    n_samples, _, width = x.shape
    found: list[torch.Tensor] = []
    stride = max(CHUNK_ELEMENTS // max(x[0].numel(), 1), 1)
    for start in range(0, n_samples, stride):
        part = slice(start, start + stride)
        e = errors_of(x[part].reshape(-1, width))
        back = g[:, part] @ w
        e = e.reshape(len(e), back.shape[1], -1)
        found.append(torch.einsum("csk,jsk->jcs", e, back.flatten(2)))
    return torch.cat(found, -1)


def _weight_deltas(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, errors_of: ErrorsOf) -> torch.Tensor:
    """Return delta_b [J, C - 1, S] of E_W: <G, X E_W^T>, some output features at a time."""
    total: torch.Tensor | None = None
    stride = max(CHUNK_ELEMENTS // max(w.shape[1], 1), 1)
    for start in range(0, w.shape[0], stride):
        part = slice(start, start + stride)
        e = errors_of(w[part])
        out = torch.stack([x @ each.T for each in e])
        delta = torch.einsum("csto,jsto->jcs", out, g[..., part])
        total = delta if total is None else total + delta
    assert total is not None  # a Linear has output features
    return total
