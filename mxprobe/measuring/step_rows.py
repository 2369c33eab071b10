"""Snapshots -> rows of the tables `tensors`, `blocks`, `whatif`, `outputs`, `routing`, `gradients`, `experts`, `events`
and `expert_spread`. Pure functions on tensors; the operands are those of `mxprobe.measuring.operands.stack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mxprobe.events import NONFINITE, Event
from mxprobe.measuring.moe import behaviour
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.moe.routing import routing_row
from mxprobe.measuring.moe.spread import expert_rows
from mxprobe.measuring.operands.block_statistics import block_row, transposition_row
from mxprobe.measuring.operands.gradient_error import DGRAD, WGRAD, gradient_error
from mxprobe.measuring.operands.operand import (
    Measured,
    Row,
    identity_event,
    measure_operand,
)
from mxprobe.measuring.operands.pieces import CPU_BATCH_ELEMENTS
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.stack import Stack
from mxprobe.measuring.operands.whatif_scores import measure_corrections
from mxprobe.measuring.recipes import Recipe, recipe_event
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role, TableRow
from mxprobe_kernels.formats import get_format
from mxprobe_kernels.torch_backend import ErrorFields


def measure_step(
    snapshots: Sequence[Snapshot | ExpertsSnapshot],
    config: AgentConfig,
    *,
    recipes: dict[tuple[str, str], Recipe],
    history: WeightHistory,
    told: dict[tuple[str, str, int], Event] | None = None,
    swallow: Callable[[str, BaseException], None] | None = None,
) -> Iterator[TableRow]:
    """Yield (table, row) for the snapshots of one step, a few at a time, so that a caller who must stop can.

    Steps count from attach. `recipes` holds the last exact recipe of each (module, phase) and is updated; `history`
    holds the trainer's weights of earlier steps; `told` what was told of each (module, phase, expert), and is updated;
    `swallow` takes what goes wrong in one snapshot, where the others are to be measured still.
    """
    step = _Step(config, recipes, history, {} if told is None else told, {})
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
    recipes: dict[tuple[str, str], Recipe]
    history: WeightHistory
    told: dict[tuple[str, str, int], Event]
    waiting: dict[int, list[tuple[Row, Measured]]]
    """By length, operands whose corrections are scored together."""

    def rows(self, snapshot: Snapshot | ExpertsSnapshot) -> Iterator[TableRow]:
        """Yield the rows of one snapshot; what stays in `waiting` is the caller's to score."""
        stack = snapshot.stack()
        if stack is None:
            return
        when = snapshot.key()
        if stack.y is not None:
            yield from self._output_rows(when, snapshot, stack)
        if isinstance(snapshot, Snapshot) and snapshot.n_rows:
            yield from self._routing_rows(when, snapshot)
            noise = self.history.noise.of_linear(snapshot.module, snapshot.phase, self.history.change(snapshot))
            if noise is not None:
                yield "events", noise.at(when)
        if snapshot.with_operands:
            yield from self._operand_rows(when, snapshot, stack)

    def _output_rows(self, when: Row, snapshot: Snapshot | ExpertsSnapshot, stack: Stack) -> Iterator[TableRow]:
        """Yield what the layer did, and what is news about it."""
        place = (snapshot.module, snapshot.phase)
        before = self.recipes.get(place)
        found = behaviour.layer_output(stack, before)
        recipe, exact = found.recipe, found.sums["exact"]
        lag, news = 0 if exact else None, None
        if isinstance(snapshot, Snapshot):
            lag, news = self.history.judge(snapshot, recipe, exact=exact)
        how = {"recipe_x": recipe[0], "recipe_w": recipe[1], **found.sums, "weight_lag": lag}
        yield "outputs", {**when, **how, "sampled_frac": stack.x.sampled_frac, "n_rows": stack.n_rows}
        if found.is_known:
            self.recipes[place] = recipe
            if before is not None and before != recipe:
                yield "events", recipe_event(place, recipe, before).at(when)
        if news is not None:
            yield "events", news.at(when)
        for expert, what in behaviour.explained(stack, found.odd, recipe, place):
            if self.told.get((*place, expert)) != what:
                self.told[(*place, expert)] = what
                yield "events", what.at(when)

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


def _findings(key: Row, measured: Measured, stack: Stack) -> Iterator[TableRow]:
    row = measured.row
    if row["n_nonfinite"]:
        state, data = "elements", {"n": row["n_nonfinite"], "n_blocks": row["n_blocks_excluded"]}
        if stack.experts is not None:
            bad = [str(e) for e, n in zip(stack.experts.numbers, measured.per_expert["n_nonfinite"]) if n]
            state, data = "experts", {"experts": ", ".join(bad)}
        yield "events", Event(NONFINITE, key["module"], state, {"role": key["role"], **data}).at(key)
    violated = identity_event(key, row)
    if violated is not None:
        yield "events", violated.at(key)
