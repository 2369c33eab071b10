"""A snapshot -> rows of `tensors`, `blocks`, `whatif`, `outputs`, `gradients`, `events`. Pure functions on tensors.

| GEMM             | operands     | blocks along | A                | B            |
|------------------|--------------|--------------|------------------|--------------|
| forward Y = XW^T | x_fwd        | in-features  | X [R, K]         | W^T [K, O_s] |
|                  | w_fwd        | in-features  | W [O_s, K]       | X^T [K, R]   |
| dgrad dX = GW    | g_dgrad      | out-features | G [R, O]         | W [O, K_s]   |
|                  | w_dgrad      | out-features | W^T [K_s, O]     | G^T [O, R]   |
| wgrad dW = G^TX  | g_wgrad      | tokens       | G^T [O_s, R]     | X [R, K_s]   |
|                  | x_wgrad      | tokens       | X^T [K_s, R]     | G [R, O_s]   |

Where there are more than `max_rows`, R is a sample: of single rows, the largest always among them and the others
weighted for it, but of whole 32-token tiles for wgrad, where a tile's rows share their blocks. Padding tokens are not
known here and are counted like any other. G is the gradient of the first micro batch of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mxprobe.events import NONFINITE, Event
from mxprobe.measuring.adapters.placement import WHOLE, Placement
from mxprobe.measuring.moe.behaviour import OutputState
from mxprobe.measuring.moe.expert_rows import measure_experts
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.moe.routing import routing_row
from mxprobe.measuring.operands.bare_weights import WeightsSnapshot, weight_operands
from mxprobe.measuring.operands.block_statistics import block_row, transposition_row
from mxprobe.measuring.operands.gradient_error import DGRAD, WGRAD, gradient_error
from mxprobe.measuring.operands.operand import (
    CPU_BATCH_ELEMENTS,
    Measured,
    Operand,
    Row,
    identity_event,
    measure_corrections,
    measure_operand,
)
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import WeightSample
from mxprobe.measuring.recipes import Call, Recipe, infer_recipe, recipe_event
from mxprobe.measuring.sampling import TILE, Rows, take
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role, TableRow
from mxprobe_kernels.formats import get_format
from mxprobe_kernels.torch_backend import ErrorFields


def operands(snapshot: Snapshot) -> Iterator[Operand]:
    """The operands that the snapshot holds, each with the matrix it meets."""
    s, w = snapshot, snapshot.weight
    x = s.single(s.x)
    n_clusters = x.shape[0] if s.row_index is None else s.n_tiles
    yield _by_rows(Operand(Role.X_FWD, x, w.rows.T, s.sampled_frac, n_clusters), s.singles)
    if s.with_weights:
        yield Operand(Role.W_FWD, w.rows, _counted(x, s.singles).T, w.out_frac, w.rows.shape[0])
    if s.gradient is None:
        return
    g = s.single(s.gradient)
    g_rows = (s.sampled_frac, n_clusters) if s.g_index is None else (g.shape[0] / s.n_gradient_rows, g.shape[0])
    yield _by_rows(Operand(Role.G_DGRAD, g, w.columns, *g_rows), s.singles_of_gradient)
    if s.with_weights:
        partner = _counted(g, s.singles_of_gradient).T
        yield Operand(Role.W_DGRAD, w.columns.T, partner, w.in_frac, w.columns.shape[1])
    x, g = s.tiled(s.x), s.tiled(s.gradient)
    x_of_g, g_of_x = (x, g) if s.g_index is None else (s.x_of_gradient, s.gradient_of_x)
    g_s = g if w.out_index is None else take(g, w.out_index, dim=1)
    x_s = x if w.in_index is None else take(x, w.in_index, dim=1)
    tiles = (s.tile_frac, s.n_tiles)
    g_tiles = tiles if s.g_index is None else (g_rows[0], -(-g.shape[0] // TILE))
    yield Operand(Role.G_WGRAD, g_s.T, _partner(g, x_of_g, w.in_index), *g_tiles)
    yield Operand(Role.X_WGRAD, x_s.T, _partner(x, g_of_x, w.out_index), *tiles)


def _by_rows(operand: Operand, singles: Rows | None) -> Operand:
    """An operand whose blocks lie within a row, so that its rows can be a sample of single ones."""
    if singles is None:
        return operand
    weight = 1 / singles.drawn_weight
    return operand._replace(n_clusters=singles.n_effective, n_certain=singles.n_certain, certain_weight=weight)


def _counted(rows: torch.Tensor, singles: Rows | None) -> torch.Tensor:
    """Rows as large as their weights make them in a sum of squares over rows."""
    if singles is None:
        return rows
    weights = singles.weights() / singles.drawn_weight
    return rows.double() * weights.sqrt()[:, None]


def _partner(operand: torch.Tensor, other: torch.Tensor | None, index: torch.Tensor | None) -> torch.Tensor:
    """The rows that an operand meets in the weight gradient; a column of zeros, which adds nothing to any sum, where
    they are on another rank."""
    if other is None:
        return operand.new_zeros(operand.shape[0], 1)
    return other if index is None else take(other, index, dim=1)


def measure_step(
    snapshots: Sequence[Snapshot | ExpertsSnapshot | WeightsSnapshot],
    config: AgentConfig,
    *,
    recipes: dict[tuple[str, str], Recipe],
    history: WeightHistory,
    experts: OutputState | None = None,
    swallow: Callable[[str, BaseException], None] | None = None,
) -> Iterator[TableRow]:
    """Yield (table, row) for the snapshots of one step, a few at a time, so that a caller who must stop can.

    Steps count from attach. `recipes` holds the last exact recipe of each (module, phase) and is updated; `history`
    holds the trainer's weights of earlier steps; `experts` what was told of single experts; `swallow` takes what goes
    wrong in one snapshot, where the others are to be measured still.
    """
    waiting: dict[int, list[tuple[Row, Measured]]] = {}
    for snapshot in snapshots:
        if isinstance(snapshot, ExpertsSnapshot):
            rows = measure_experts(snapshot, config, state=experts or OutputState())
        elif isinstance(snapshot, WeightsSnapshot):
            rows = _operand_rows(snapshot.key(), weight_operands(snapshot.weight), snapshot.weight, config, waiting)
        else:
            rows = _snapshot_rows(snapshot, config, recipes, history, waiting)
        try:
            yield from rows
        except Exception as error:
            if swallow is None:
                raise
            swallow(f"measuring {snapshot.module}", error)
    for alike in waiting.values():
        yield from _whatif_rows(alike, config)


def _snapshot_rows(
    snapshot: Snapshot,
    config: AgentConfig,
    recipes: dict[tuple[str, str], Recipe],
    history: WeightHistory,
    waiting: dict[int, list[tuple[Row, Measured]]],
) -> Iterator[TableRow]:
    """`waiting` holds, by length, operands whose corrections are scored together; what stays in it is the caller's."""
    when = snapshot.key()
    yield from _output_rows(when, snapshot, recipes, history)
    yield from _routing_rows(when, snapshot, config)
    noise = history.noise.of_linear(snapshot.module, snapshot.phase, history.change(snapshot))
    if noise is not None:
        yield "events", noise.at(when)
    fields: dict[Role, ErrorFields] = {}
    clusters: dict[Role, Row] = {}
    if snapshot.with_operands:
        yield from _operand_rows(
            *(when, operands(snapshot), snapshot.weight, config, waiting),
            placement=snapshot.placement,
            fields=fields,
            clusters=clusters,
        )
    if snapshot.g_index is not None:
        fields.pop(Role.G_WGRAD, None)  # this rank has other tokens of G than of X: dW is not a product of the two
    yield from _gradient_rows(when, fields, clusters, config)


def _operand_rows(
    when: Row,
    measured_operands: Iterator[Operand],
    weight: WeightSample,
    config: AgentConfig,
    waiting: dict[int, list[tuple[Row, Measured]]],
    *,
    placement: Placement = WHOLE,
    fields: dict[Role, ErrorFields] | None = None,
    clusters: dict[Role, Row] | None = None,
) -> Iterator[TableRow]:
    """Rows of each operand; `fields` and `clusters` are filled by role."""
    fields, clusters = {} if fields is None else fields, {} if clusters is None else clusters
    for operand in measured_operands:
        measured = measure_operand(operand, format=config.format, rule=config.rule)
        if operand.role is not Role.X_FWD:  # meets no other role's below, and is large
            fields[operand.role] = measured.weighted
        clusters[operand.role] = {"sampled_frac": operand.sampled_frac, "n_clusters": operand.n_clusters}
        key: Row = {**when, "role": operand.role.value, "placement": placement.words(operand.role)}
        key.update(format=config.format, rule=config.rule)
        length, block = operand.a.shape[1], get_format(config.format).block
        edges = operand.n_counted * placement.edge_blocks(operand.role, length, 1, block)
        yield "tensors", {**key, **measured.row, "n_edge_blocks": round(edges)}
        sampled = {name: measured.row[name] for name in ("sampled_frac", "n_clusters")}
        statistics = block_row(measured.fields, measured.weights)
        if operand.role is Role.W_DGRAD:  # comes after W_FWD
            statistics.update(transposition_row(fields[Role.W_FWD], measured.fields, weight.out_index, weight.in_index))
        yield "blocks", {**key, **sampled, **statistics}
        yield from _findings(key, measured.row)
        alike = waiting.setdefault(operand.a.shape[1], [])
        alike.append((key, measured))
        if sum(m.fields.x.numel() for _, m in alike) >= CPU_BATCH_ELEMENTS:
            yield from _whatif_rows(waiting.pop(operand.a.shape[1]), config)


def _whatif_rows(batch: list[tuple[Row, Measured]], config: AgentConfig) -> Iterator[TableRow]:
    for (key, _), rows in zip(batch, measure_corrections([m for _, m in batch], config.whatifs)):
        for row in rows:
            yield "whatif", {**key, **row}


def _gradient_rows(
    when: Row, fields: dict[Role, ErrorFields], clusters: dict[Role, Row], config: AgentConfig
) -> Iterator[TableRow]:
    key = {name: when[name] for name in ("step", "micro_step", "time_ns", "module")}
    key.update(format=config.format, rule=config.rule)
    for gemm, left, right in ((WGRAD, Role.G_WGRAD, Role.X_WGRAD), (DGRAD, Role.G_DGRAD, Role.W_DGRAD)):
        if left in fields and right in fields:
            for row in gradient_error(gemm, fields[left], fields[right]):
                yield "gradients", {**key, **clusters[left], **row}


def _output_rows(
    when: Row, snapshot: Snapshot, recipes: dict[tuple[str, str], Recipe], history: WeightHistory
) -> Iterator[TableRow]:
    """What the layer did, and what is news about it; nothing where the module does not show its own output."""
    if snapshot.y is None:
        return
    before = recipes.get((snapshot.module, snapshot.phase))
    output = _output_row(snapshot, snapshot.y, recipes)
    recipe = (output["recipe_x"], output["recipe_w"])
    found = history.judge(snapshot, recipe, exact=output["exact"])
    yield "outputs", {**when, **output, "weight_lag": found.weight_lag}
    if output["exact"] and before is not None and before != recipe:
        yield "events", recipe_event((snapshot.module, snapshot.phase), recipe, before).at(when)
    if found.event is not None:
        yield "events", found.event.at(when)


def _routing_rows(when: Row, snapshot: Snapshot, config: AgentConfig) -> Iterator[TableRow]:
    routing = routing_row(snapshot, format=config.format, rule=config.rule)
    if routing is not None:
        yield "routing", {**when, "format": config.format, "rule": config.rule, **routing}


def _output_row(snapshot: Snapshot, output: torch.Tensor, recipes: dict[tuple[str, str], Recipe]) -> Row:
    bias = snapshot.weight.bias
    y = output if bias is None else output.double() - bias.double()
    place = (snapshot.module, snapshot.phase)
    x = snapshot.single(snapshot.x)
    call = Call(x, snapshot.weight.rows, snapshot.single(y), output.dtype, snapshot.row_weights())
    recipe, sums = infer_recipe(call, recipes.get(place))
    if sums["exact"]:
        recipes[place] = recipe
    return {
        "recipe_x": recipe[0],
        "recipe_w": recipe[1],
        "sampled_frac": snapshot.sampled_frac,
        "n_rows": x.shape[0],
        **sums,
    }


def _findings(key: Row, row: Row) -> Iterator[TableRow]:
    if row["n_nonfinite"]:
        data = {"role": key["role"], "n": row["n_nonfinite"], "n_blocks": row["n_blocks_excluded"]}
        yield "events", Event(NONFINITE, key["module"], "elements", data).at(key)
    violated = identity_event(key, row)
    if violated is not None:
        yield "events", violated.at(key)
