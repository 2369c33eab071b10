"""Snapshots -> rows of the tables `tensors`, `blocks`, `whatif`, `outputs`, `routing`, `gradients`, `experts`, `events`
and `expert_spread`. Pure functions on tensors; the operands are those of `mxprobe.measuring.operands.stack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mxprobe.measuring.moe import behaviour
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.moe.routing import routing_row
from mxprobe.measuring.moe.spread import expert_rows
from mxprobe.measuring.operands.block_statistics import block_row, transposition_row
from mxprobe.measuring.operands.gradient_error import DGRAD, WGRAD, gradient_error
from mxprobe.measuring.operands.operand import (
    IDENTITY_TOLERANCE,
    Measured,
    Row,
    identity_error,
    measure_operand,
)
from mxprobe.measuring.operands.pieces import CPU_BATCH_ELEMENTS
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.stack import Stack
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.measuring.recipes import Recipe, words_of
from mxprobe.measuring.versions.weight_history import EVENT, WeightHistory
from mxprobe.measuring.versions.weight_noise import EVENT as NOISE_EVENT
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role
from mxprobe_kernels.formats import get_format
from mxprobe_kernels.torch_backend import ErrorFields

TableRow = tuple[str, Row]


def measure_step(
    snapshots: Sequence[Snapshot | ExpertsSnapshot],
    config: AgentConfig,
    *,
    step_base: int,
    recipes: dict[tuple[str, str], Recipe],
    history: WeightHistory,
    told: dict[tuple[str, str, int], str] | None = None,
    swallow: Callable[[str, BaseException], None] | None = None,
) -> Iterator[TableRow]:
    """Yield (table, row) for the snapshots of one step, a few at a time, so that a caller who must stop can.

    `step_base` is the number of steps the run had taken before attach; `recipes` holds the last exact recipe of
    each (module, phase) and is updated; `history` holds the trainer's weights of earlier steps; `told` what was
    told of each (module, phase, expert), and is updated; `swallow` takes what goes wrong in one snapshot, where the
    others are to be measured still.
    """
    step = _Step(config, step_base, recipes, history, {} if told is None else told, {})
    for snapshot in snapshots:
        try:
            yield from step.rows(snapshot)
        except Exception as error:
            if swallow is None:
                raise
            swallow(f"measuring {snapshot.module}", error)
    for alike in step.waiting.values():
        yield from step.whatif_rows(alike)


@dataclass
class _Step:
    """One call of `measure_step`, whose arguments it holds."""

    config: AgentConfig
    step_base: int
    recipes: dict[tuple[str, str], Recipe]
    history: WeightHistory
    told: dict[tuple[str, str, int], str]
    waiting: dict[int, list[tuple[Row, Measured]]]
    """By length, operands whose corrections are scored together."""

    def rows(self, snapshot: Snapshot | ExpertsSnapshot) -> Iterator[TableRow]:
        """Yield the rows of one snapshot; what stays in `waiting` is the caller's to score."""
        stack = snapshot.stack()
        if stack is None:
            return
        when = snapshot.key(self.step_base)
        if stack.y is not None:
            yield from self._output_rows(when, snapshot, stack)
        if isinstance(snapshot, Snapshot) and snapshot.n_rows:
            yield from self._routing_rows(when, snapshot)
            noise = self.history.noise.of_linear(snapshot.module, snapshot.phase, self.history.change(snapshot))
            if noise:
                yield "events", _event(when, NOISE_EVENT, noise)
        if snapshot.with_operands:
            yield from self._operand_rows(when, snapshot, stack)

    def _output_rows(self, when: Row, snapshot: Snapshot | ExpertsSnapshot, stack: Stack) -> Iterator[TableRow]:
        """Yield what the layer did, and what is news about it."""
        place = (snapshot.module, snapshot.phase)
        before = self.recipes.get(place)
        found = behaviour.layer_output(stack, before)
        recipe, exact = found.recipe, found.sums["exact"]
        lag, news = 0 if exact else None, ""
        if isinstance(snapshot, Snapshot):
            lag, news = self.history.judge(snapshot, recipe, exact=exact, step_base=self.step_base)
        how = {"recipe_x": recipe[0], "recipe_w": recipe[1], **found.sums, "weight_lag": lag}
        yield "outputs", {**when, **how, "sampled_frac": stack.x.sampled_frac, "n_rows": stack.n_rows}
        if found.is_known:
            self.recipes[place] = recipe
            if before not in (None, recipe):
                detail = f"{' '.join(place)} {words_of(recipe)}: it was {words_of(before)} before"
                yield "events", _event(when, "recipe", detail)
        if news:
            yield "events", _event(when, EVENT, news)
        for expert, what in behaviour.explained(stack, found.odd, recipe):
            if self.told.get((*place, expert)) != what:
                self.told[(*place, expert)] = what
                others = f"the layer's other experts: {words_of(recipe)}"
                detail = f"{place[0]} expert {expert} {place[1]}: {what}; {others}"
                yield "events", _event(when, behaviour.EVENT, detail)

    def _routing_rows(self, when: Row, snapshot: Snapshot) -> Iterator[TableRow]:
        how = {"format": self.config.format, "rule": self.config.rule}
        routing = routing_row(snapshot, **how)
        if routing is not None:
            yield "routing", {**when, **how, **routing}

    def _operand_rows(self, when: Row, snapshot: Snapshot | ExpertsSnapshot, stack: Stack) -> Iterator[TableRow]:
        """Yield the rows of each operand, then of the gradient products that they meet in."""
        how = {"format": self.config.format, "rule": self.config.rule}
        block = get_format(self.config.format).block
        fields: dict[Role, ErrorFields] = {}
        shares: dict[Role, Row] = {}
        for operand in stack.operands(with_weights=snapshot.with_weights):
            measured = measure_operand(operand, **how)
            if operand.role is not Role.X_FWD:  # meets no other role's below, and is large
                fields[operand.role] = measured.weighted
            sampled = shares[operand.role] = {name: measured.row[name] for name in ("sampled_frac", "n_clusters")}
            place = {"role": operand.role.value, "placement": stack.placement.words(operand.role)}
            key: Row = {**when, **place, **how}
            edges = operand.n_counted * stack.placement.edge_blocks(operand.role, operand.a.shape[-1], 1, block)
            yield "tensors", {**key, **measured.row, "n_edge_blocks": round(edges)}
            if not operand.has_cut_blocks:
                statistics = block_row(measured.fields, measured.weights)
                if operand.role is Role.W_DGRAD and stack.experts is None:  # comes after W_FWD
                    of_rows = fields[Role.W_FWD]
                    statistics.update(transposition_row(of_rows, measured.fields, stack.out_index, stack.in_index))
                yield "blocks", {**key, **sampled, **statistics}
            if stack.experts is not None:
                yield from expert_rows(
                    {**key, **sampled}, stack.experts, measured.per_expert, worst=self.config.experts
                )
            yield from _findings(key, measured, stack)
            if stack.experts is not None:
                yield from self.whatif_rows([(key, measured)])
                continue
            alike = self.waiting.setdefault(operand.a.shape[-1], [])
            alike.append((key, measured))
            if sum(m.fields.x.numel() for _, m in alike) >= CPU_BATCH_ELEMENTS:
                yield from self.whatif_rows(self.waiting.pop(operand.a.shape[-1]))
        yield from self._gradient_rows(when, stack, fields, shares)

    def _gradient_rows(
        self, when: Row, stack: Stack, fields: dict[Role, ErrorFields], shares: dict[Role, Row]
    ) -> Iterator[TableRow]:
        how = {"format": self.config.format, "rule": self.config.rule}
        key = {name: when[name] for name in ("step", "micro_step", "time_ns", "module")}
        for gemm, left, right in ((WGRAD, Role.G_WGRAD, Role.X_WGRAD), (DGRAD, Role.G_DGRAD, Role.W_DGRAD)):
            # Without the same tokens dW is not a product of the two.
            if left in fields and right in fields and (gemm == DGRAD or stack.has_same_tokens):
                share = shares[left if stack.experts is None else Role.G_WGRAD]  # an expert's tokens come in tiles
                for row in gradient_error(gemm, fields[left], fields[right], in_halves=stack.experts is None):
                    yield "gradients", {**key, **how, **share, **row}

    def whatif_rows(self, batch: list[tuple[Row, Measured]]) -> Iterator[TableRow]:
        for (key, _), rows in zip(batch, measure_corrections([m for _, m in batch], self.config.whatifs)):
            for row in rows:
                yield "whatif", {**key, **row}


def _event(when: Row, kind: str, detail: str) -> Row:
    return {"step": when["step"], "time_ns": when["time_ns"], "kind": kind, "detail": detail}


def _findings(key: Row, measured: Measured, stack: Stack) -> Iterator[TableRow]:
    row, place = measured.row, f"{key['module']} {key['role']}"
    if row["n_nonfinite"]:
        where = f"{row['n_nonfinite']} non-finite elements, {row['n_blocks_excluded']} blocks left out"
        if stack.experts is not None:
            bad = [str(e) for e, n in zip(stack.experts.numbers, measured.per_expert["n_nonfinite"]) if n]
            where = f"non-finite elements in expert {', '.join(bad)}"
        yield "events", _event(key, "nonfinite", f"{place}: {where}")
    if identity_error(row) > IDENTITY_TOLERANCE:
        detail = f"{place}: components differ from their total by {identity_error(row):.1e} of it"
        yield "events", _event(key, "identity", detail)
