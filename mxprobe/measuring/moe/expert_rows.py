"""A snapshot of experts -> rows of `tensors`, `blocks`, `whatif`, `gradients`, `outputs`, `experts`, `expert_spread`.

Sums of a layer are sums over the experts measured, each taken with its own tokens: blocks along tokens begin again at
each expert. An expert that was sent no token multiplies nothing and is left out, its weight too. Rows of zeros, with
which some engines fill an expert's part up to a multiple of their tile, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxprobe.events import NONFINITE, Event
from mxprobe.measuring.moe.behaviour import OutputState, output_rows
from mxprobe.measuring.moe.expert_operands import ELEMENTWISE, Measured, Operands, measure
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.moe.spread import expert_rows
from mxprobe.measuring.moe.stack import Stack, stack
from mxprobe.measuring.operands.block_statistics import block_row
from mxprobe.measuring.operands.gradient_error import DGRAD, WGRAD, gradient_error
from mxprobe.measuring.operands.operand import (
    CPU_BATCH_ELEMENTS,
    DEVICE_BATCH_ELEMENTS,
    identity_event,
)
from mxprobe.measuring.sampling import take
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role, Row, TableRow
from mxprobe_kernels.torch_backend import ErrorFields

_SUMMED = ("ref2", "err2", "ref_err")
_NO_HALVES = dict.fromkeys(("half_a2", "half_b2", "half_ab"), float("nan"))


def measure_experts(snapshot: ExpertsSnapshot, config: AgentConfig, *, state: OutputState) -> Iterator[TableRow]:
    """Rows of one snapshot. `state` remembers what was told of the experts' outputs."""
    when = snapshot.key()
    held = stack(snapshot)
    if held is not None:
        yield from output_rows(when, held, state)
        if snapshot.with_operands:
            yield from _operand_rows(when, held, config, with_weights=snapshot.with_weights)


def _operand_rows(when: Row, held: Stack, config: AgentConfig, *, with_weights: bool) -> Iterator[TableRow]:
    for_gradients: dict[Role, list[ErrorFields]] = {}
    how = {"format": config.format, "rule": config.rule}
    for each in operands(held, with_weights=with_weights):
        found = measure(each, config.whatifs, **how)
        if each.role not in (Role.X_FWD, Role.W_FWD):
            for_gradients[each.role] = found.fields
        key: Row = {**when, "role": each.role.value, **how}
        yield "tensors", {**key, **found.row}
        sampled = {name: found.row[name] for name in ("sampled_frac", "n_clusters")}
        if each.features_only:
            yield "blocks", {**key, **sampled, **_block_sums(found)}
        yield from expert_rows({**key, **sampled}, held, found.per_expert, worst=config.experts)
        yield from _findings(key, held, found)
        for row in found.whatifs:
            yield "whatif", {**key, **row}
    shared = {name: when[name] for name in ("step", "micro_step", "time_ns", "module")}
    shared.update(how, sampled_frac=held.sampled_frac, n_clusters=held.n_tiles)
    for gemm, left, right in ((WGRAD, Role.G_WGRAD, Role.X_WGRAD), (DGRAD, Role.G_DGRAD, Role.W_DGRAD)):
        if left in for_gradients and right in for_gradients:
            for row in _gradient_rows(gemm, for_gradients[left], for_gradients[right]):
                yield "gradients", {**shared, **row}


def operands(held: Stack, *, with_weights: bool) -> Iterator[Operands]:
    """The operands of the experts' GEMMs, each with the matrix it meets; see `mxprobe.measuring.step_rows`."""
    rows, always = held.there[:, :, None], held.there.new_ones(1, 1, 1)
    w, columns = held.weight_rows, held.weight_columns
    by_row = (held.sampled_frac, held.n_rows)
    out_frac, in_frac = w.shape[1] / columns.shape[1], columns.shape[2] / w.shape[2]
    share = len(held.experts) / max(held.n_called, 1)
    at_once = _experts_at_once(held)
    yield Operands(Role.X_FWD, held.x, w.mT, rows, *by_row, True, at_once)
    if with_weights:
        yield Operands(Role.W_FWD, w, held.x.mT, always, out_frac * share, w.shape[0] * w.shape[1], True, at_once)
    if held.gradient is None:
        return
    g = held.gradient
    yield Operands(Role.G_DGRAD, g, columns, rows, *by_row, True, at_once)
    if with_weights:
        n_columns = columns.shape[0] * columns.shape[2]
        yield Operands(Role.W_DGRAD, columns.mT, g.mT, always, in_frac * share, n_columns, True, at_once)
    g_s = g if held.out_index is None else take(g, held.out_index, dim=2)
    x_s = held.x if held.in_index is None else take(held.x, held.in_index, dim=2)
    tokens = held.there[:, None, :]
    yield Operands(Role.G_WGRAD, g_s.mT, x_s, tokens, held.sampled_frac, held.n_tiles, False, at_once)
    yield Operands(Role.X_WGRAD, x_s.mT, g_s, tokens, held.sampled_frac, held.n_tiles, False, at_once)


def _experts_at_once(held: Stack) -> int:
    rows, out_features, in_features = held.x.shape[1], held.weight_columns.shape[1], held.x.shape[2]
    out_sampled, in_sampled = held.weight_rows.shape[1], held.weight_columns.shape[2]
    largest = max(rows * max(in_features, out_features), out_sampled * in_features, in_sampled * out_features)
    return max((CPU_BATCH_ELEMENTS if held.x.device.type == "cpu" else DEVICE_BATCH_ELEMENTS) // largest, 1)


def _gradient_rows(gemm: str, left: list[ErrorFields], right: list[ErrorFields]) -> Iterator[Row]:
    """One row per component, over all experts. No halves: those of an expert's few tokens are of unequal size."""
    total: dict[str, Row] = {}
    for a, b in zip(left, right):
        for row in gradient_error(gemm, a, b):
            held = total.setdefault(row["component"], {**row, **dict.fromkeys(_SUMMED, 0.0), **_NO_HALVES})
            for name in _SUMMED:
                held[name] += row[name]
    yield from total.values()


def _block_sums(found: Measured) -> Row:
    """Of all experts' blocks; channels are the layer's, the same for each expert."""
    width = found.fields[0].x.shape[-1]
    parts = {name: [getattr(part, name).reshape(-1, width) for part in found.fields] for name in ELEMENTWISE}
    return block_row(found.fields[0]._replace(**{name: torch.cat(each) for name, each in parts.items()}))


def _findings(key: Row, held: Stack, found: Measured) -> Iterator[TableRow]:
    bad = [str(held.experts[i]) for i, n in enumerate(found.per_expert["n_nonfinite"]) if n]
    if bad:
        data = {"role": key["role"], "experts": ", ".join(bad)}
        yield "events", Event(NONFINITE, key["module"], "experts", data).at(key)
    violated = identity_event(key, found.row)
    if violated is not None:
        yield "events", violated.at(key)
