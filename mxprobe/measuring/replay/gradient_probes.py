"""The effect of one operand's error on the weight gradients of the whole model, wherever it travels.

    g(delta) = all dW with delta added to one operand          g(0) = g
    ||g(E) - g||^2  ~  E_v [ <d<v, g>/d delta, E>^2 ],         v ~ N(0, 1), K directions

By double backward: one forward and one backward build the graph of g, one backward of <v, g> a direction gives the
derivative by every operand of every GEMM at once. First order; measured against reruns in benchmarks/sensitivity.py.
Errors of wgrad's operands reach their own dW only, and are propagated exactly: E_G^T X and G^T E_X.
Attention is that of plain products (math), because fused kernels have no second derivative. Where the model holds
another operator without one, or the operands do not fit, groups of operands (a kind of module and a role) are rounded
alone and the call run again: exact, coarser, and without components.

Errors are of the six operands, each in blocks along its own contraction axis (`backward`). R rows, K in features, O
out features, C components.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mxprobe_kernels
from mxprobe.measuring.compat import backward_node_class, own_parts
from mxprobe.measuring.interruptions import is_of_a_signal_handler
from mxprobe.measuring.replay.arms import BACKWARD_ROLES, FORWARD_ROLES, HIGH, arm_product, quantizer, run_arm
from mxprobe.measuring.replay.backward import WeightGradients
from mxprobe.measuring.replay.captured_call import Call, forward_policy, replayed
from mxprobe.measuring.replay.components import error_parts, with_total
from mxprobe.measuring.replay.interception import intercepted
from mxprobe.measuring.replay.policy_output import PolicyGradient
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.schema import COMPONENTS, Role, Row

ROLES = (*FORWARD_ROLES, *BACKWARD_ROLES)
_TRAVEL = (*FORWARD_ROLES, Role.G_DGRAD, Role.W_DGRAD)
DOUBLE_BACKWARD, INTERVENTION = "double_backward", "intervention"
MAX_ELEMENTS = 1 << 27
"""Elements of all operands of the call, over which groups are intervened on; about 20 bytes each are held."""
MAX_GROUPS = 48


class _Operands(NamedTuple):
    """One call of one Linear: places to differentiate by, one a role, and the operands themselves."""

    name: str
    places: dict[Role, torch.Tensor]
    """Zeros without storage, shaped as the operand: [rows, contraction]."""
    values: dict[Role, torch.Tensor]
    """Filled by the forward and the first backward."""


class _ProbedLinear(torch.autograd.Function):
    """X [R, K], W [O, K] -> X W^T, whose two backward products have places of their own: twice differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, operands: _Operands, *places: torch.Tensor) -> torch.Tensor:
        _, _, *backward = places
        ctx.save_for_backward(x, w, *backward)
        ctx.operands = operands
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        x, w, d_g_dgrad, d_w_dgrad, d_g_wgrad, d_x_wgrad = ctx.saved_tensors
        (g,) = outputs
        values = ctx.operands.values
        if Role.G_DGRAD not in values:
            g0 = g.detach()
            values.update({Role.G_DGRAD: g0, Role.G_WGRAD: g0.T})
        back = (g + d_g_dgrad) @ (w + d_w_dgrad.T)
        d_w = (g.T + d_g_wgrad) @ (x.T + d_x_wgrad).T
        return back, d_w, None, g @ w, g.T @ x, None, None, None, None


_OURS = backward_node_class(_ProbedLinear)


def probe_gradients(
    call: Call,
    modules: Mapping[str, nn.Linear],
    gradient: PolicyGradient,
    *,
    n_probes: int = 16,
    format: str = "mxfp4",
    rule: str = "rceil",
    seed: int = 0,
) -> list[Row]:
    """Return rows of table `gradient_probes` without when; copies from the device.

    gradient: that of the run's loss at the policy. By double backward where that works, else by interventions.
    NotReplayableError where the model returns no policy, or no weight gradient is reached.
    """
    try:
        return _by_double_backward(call, modules, gradient, n_probes, format, rule, seed)
    except _NotTwiceDifferentiableError:
        return _by_interventions(call, modules, gradient, format, rule, seed)


class _NotTwiceDifferentiableError(Exception):
    """An operator of the model has no second derivative, or the operands are too large."""


def _by_double_backward(
    call: Call,
    modules: Mapping[str, nn.Linear],
    gradient: PolicyGradient,
    n_probes: int,
    format: str,
    rule: str,
    seed: int,
) -> list[Row]:
    seen: list[_Operands] = []
    weights: dict[str, torch.Tensor] = {}
    size = 0

    def product(name: str, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        nonlocal size
        with torch.autocast(x.device.type, enabled=False):
            if name not in weights:
                weights[name] = module.weight.detach().float().requires_grad_()
            rows, w = x.reshape(-1, x.shape[-1]).float(), weights[name]
            (n_rows, width), out = rows.shape, w.shape[0]
            size += 2 * (n_rows * width + n_rows * out + width * out)
            if size > MAX_ELEMENTS or not torch.is_grad_enabled():
                raise _NotTwiceDifferentiableError
            shapes = ((n_rows, width), (out, width), (n_rows, out), (width, out), (out, n_rows), (width, n_rows))
            zero = torch.zeros((), device=x.device)
            places = {role: zero.expand(shape).requires_grad_() for role, shape in zip(ROLES, shapes)}
            rows0, w0 = rows.detach(), w.detach()
            values = {Role.X_FWD: rows0, Role.W_FWD: w0, Role.W_DGRAD: w0.T, Role.X_WGRAD: rows0.T}
            seen.append(_Operands(name, places, values))
            y = _ProbedLinear.apply(rows, w, seen[-1], *places.values())
            bias: Any = own_parts(module, "_parameters").get("bias")
            y = y if bias is None else y + bias.detach().float()
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return y.reshape(*x.shape[:-1], -1).to(dtype)

    with ExitStack() as stack:
        stack.enter_context(replayed(call, gradient=True))
        stack.enter_context(intercepted(modules, product))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        policy = forward_policy(call)
        outputs, at_outputs = gradient.pairs(policy)
        trained = {name: w for name, w in weights.items() if modules[name].weight.requires_grad}
        if not outputs or not trained:
            raise NotReplayableError("no gradient of the policy reaches a trained weight")
        if _has_foreign_function(outputs):
            raise _NotTwiceDifferentiableError
        try:
            found = _gradients(outputs, list(trained.values()), at_outputs, create_graph=True)
            whole: dict[str, torch.Tensor] = {name: g for name, g in zip(trained, found) if g is not None}
            if not whole:
                raise NotReplayableError("no gradient of the policy reaches a trained weight")
            return _rows(seen, whole, n_probes, format, rule, seed)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or is_of_a_signal_handler(error):
                raise
            raise _NotTwiceDifferentiableError from error


def _has_foreign_function(outputs: Sequence[torch.Tensor]) -> bool:
    """Say whether a Python-defined operator that is not ours made any of it.

    Its backward may call a kernel without a derivative; autograd then takes the result for a constant and says nothing.
    """
    waiting: list[Any] = [y.grad_fn for y in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not isinstance(node, _OURS):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _rows(
    seen: list[_Operands], whole: dict[str, torch.Tensor], n_probes: int, format: str, rule: str, seed: int
) -> list[Row]:
    """Return one row per module, role and component, from both ways of propagating."""
    with torch.no_grad():
        errors = [
            {r: error_parts(mxprobe_kernels.error_fields(v, format=format, rule=rule)) for r, v in each.values.items()}
            for each in seen
        ]
        ref2 = float(torch.stack([g.detach().double().square().sum() for g in whole.values()]).sum())
        local = _local(seen, errors, whole)
    travelled = _travelled(seen, errors, list(whole.values()), n_probes, seed)
    shared = {"method": DOUBLE_BACKWARD, "n_probes": n_probes, "ref2": ref2}
    return [
        {"module": name, "role": role.value, "component": component, **shared, "err2": err2}
        for (name, role), values in {**travelled, **local}.items()
        for component, err2 in zip(COMPONENTS, values.tolist())
    ]


def _travelled(
    seen: list[_Operands],
    errors: list[dict[Role, torch.Tensor]],
    whole: list[torch.Tensor],
    n_probes: int,
    seed: int,
) -> dict[tuple[str, Role], torch.Tensor]:
    """Return float64 [C]: the mean over directions of <derivative, error>^2; the same weight called twice adds up."""
    device = whole[0].device
    places = [(i, role, each.places[role]) for i, each in enumerate(seen) for role in each.values if role in _TRAVEL]
    total: dict[tuple[str, Role], torch.Tensor] = {}
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    for _ in range(n_probes):
        along = [torch.randn(g.shape, generator=generator, device=device) for g in whole]
        product = torch.stack([(v * g).sum() for v, g in zip(along, whole)]).sum()
        derivatives = _gradients(product, [p for *_, p in places], retain_graph=True)
        delta: dict[tuple[str, Role], torch.Tensor] = {}
        with torch.no_grad():
            for (i, role, _), derivative in zip(places, derivatives):
                e, key = errors[i][role].flatten(1), (seen[i].name, role)
                parts = e.new_zeros(len(e)) if derivative is None else e @ derivative.reshape(-1)
                delta[key] = delta.get(key, 0.0) + with_total(parts).double()
            for key, each in delta.items():
                total[key] = total.get(key, 0.0) + each.square() / n_probes
    return total


def _local(
    seen: list[_Operands], errors: list[dict[Role, torch.Tensor]], trained: Collection[str]
) -> dict[tuple[str, Role], torch.Tensor]:
    """Return float64 [C], ||E_G^T X||^2 and ||G^T E_X||^2 of each component, for the modules that have a gradient."""
    products: dict[tuple[str, Role], torch.Tensor] = {}
    for each, parts in zip(seen, errors):
        if Role.G_WGRAD in each.values and each.name in trained:
            for role, met in ((Role.G_WGRAD, Role.X_WGRAD), (Role.X_WGRAD, Role.G_WGRAD)):
                made = with_total(parts[role] @ each.values[met].T.float())
                products[each.name, role] = products.get((each.name, role), 0.0) + made
    return {key: made.double().square().sum((1, 2)) for key, made in products.items()}


def _gradients(*arguments: Any, **options: Any) -> Sequence[Any]:
    """Return the gradients of `torch.autograd.grad`, None where an input is not reached."""
    return torch.autograd.grad(*arguments, allow_unused=True, **options)


def _by_interventions(
    call: Call, modules: Mapping[str, nn.Linear], gradient: PolicyGradient, format: str, rule: str, seed: int
) -> list[Row]:
    high = WeightGradients(modules)
    run_arm(call, modules, arm_product(quantizer(HIGH), gradients=high), gradient, high)
    if not high.of:
        raise NotReplayableError("no gradient of the policy reaches a trained weight")
    rows: list[Row] = []
    for pattern, role, members in groups(modules):
        found = WeightGradients(modules)
        quantize = quantizer("q", format=format, rule=rule)
        only = {(name, role) for name in members}
        run_arm(call, modules, arm_product(quantize, only=only, seed=seed, gradients=found), gradient, found)
        sums = torch.stack([each.values for each in found.against(high, modules)]).sum(0).tolist()
        shared = {"method": INTERVENTION, "n_probes": 0, "ref2": sums[0], "err2": sums[1]}
        rows.append({"module": pattern, "role": role.value, "component": "total", **shared})
    return rows


def groups(modules: Mapping[str, nn.Linear]) -> Iterator[tuple[str, Role, list[str]]]:
    """Yield (pattern, role, modules of it): by the last part of names, or by role alone where these are too many."""
    by_kind: dict[str, list[str]] = {}
    for name in modules:
        by_kind.setdefault(f"*{name.rpartition('.')[2]}", []).append(name)
    if len(by_kind) * len(ROLES) > MAX_GROUPS:
        by_kind = {"*": list(modules)}
    for role in ROLES:
        for pattern, members in by_kind.items():
            yield pattern, role, members
