"""Rows of a step from a snapshot, against the same numbers from whole tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mxprobe_kernels
from mxprobe.events import finished
from mxprobe.measuring.adapters.placement import Placement, Shard
from mxprobe.measuring.operands.copying import choose_rows
from mxprobe.measuring.operands.operand import IDENTITY_TOLERANCE, identity_error
from mxprobe.measuring.operands.snapshot import Snapshot
from mxprobe.measuring.operands.weights import sample_weight
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe.schema import Role
from mxprobe.tables import TABLES

ROWS, K, OUT = 96, 64, 48


def snapshot(*, bias: bool = False, max_features: int = 4096, rows: int = ROWS, **changes: Any) -> Snapshot:
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(K, OUT, bias=bias)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(rows, K, generator=generator)
    weight = sample_weight(module, max_features=max_features, seed=5)
    assert weight is not None
    y = module(x).detach()
    values: dict[str, Any] = {
        "module": "layers.0.up",
        "phase": "train",
        "step": 3,
        "micro_step": 0,
        "time_ns": 17,
        "n_rows": rows,
        "row_index": None,
        "x": x,
        "y": y if weight.out_index is None else y[:, weight.out_index],
        "y_watched": y[:, weight.watched_index],
        "weight": weight,
        "with_operands": True,
        "with_weights": True,
        "gradient": torch.randn(rows, OUT, generator=generator),
    }
    return Snapshot(**{**values, **changes})


def measure(snapshot: Snapshot, **config: Any) -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {}
    for table, row in measure_step([snapshot], AgentConfig(**config), recipes={}, history=WeightHistory()):
        tables.setdefault(table, []).append(finished(row, 100))
    return tables


def by_role(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["role"]: row for row in rows}


def test_every_row_has_exactly_the_columns_of_its_table():
    tables = measure(snapshot())
    assert set(tables) == {"outputs", "tensors", "blocks", "whatif", "gradients"}
    for table, rows in tables.items():
        for row in rows:
            assert set(row) == {name for name, _ in TABLES[table]}
    assert {row["step"] for rows in tables.values() for row in rows} == {103}


def test_each_role_is_quantized_along_its_own_contraction_axis():
    s = snapshot()
    rows = by_role(measure(s)["tensors"])
    x, g, w = s.x, s.gradient, s.weight.rows
    assert g is not None
    for role, tensor, dim, other in (
        (Role.X_FWD, x, 1, w.T),
        (Role.W_FWD, w, 1, x.T),
        (Role.G_DGRAD, g, 1, w),
        (Role.W_DGRAD, w, 0, g.T),
        (Role.G_WGRAD, g, 0, x),
        (Role.X_WGRAD, x, 0, g),
    ):
        row = rows[role.value]
        fields = mxprobe_kernels.error_fields(tensor, dim=dim)
        assert row["sum_e2"] == pytest.approx(fields.decomposition().sum_e2, rel=1e-6), role
        e = fields.q - tensor.double()
        product = (e if dim == 1 else e.T) @ other.double()
        assert row["out_e2"] == pytest.approx(float((product**2).sum()), rel=1e-9), role
        reference = (tensor if dim == 1 else tensor.T).double() @ other.double()
        assert row["out_ref2"] == pytest.approx(float((reference**2).sum()), rel=1e-9), role


def test_roles_follow_what_is_at_hand():
    assert set(by_role(measure(snapshot(gradient=None))["tensors"])) == {"x_fwd", "w_fwd"}
    assert set(by_role(measure(snapshot(with_weights=False))["tensors"])) == {"x_fwd", "g_dgrad", "g_wgrad", "x_wgrad"}
    assert set(measure(snapshot(with_operands=False))) == {"outputs"}


def test_one_whatif_row_for_each_operand_and_correction():
    whatif = measure(snapshot(), whatifs=("rule:even", "of:0.5", "nvfp4"))["whatif"]
    assert len({(row["role"], row["correction"]) for row in whatif}) == len(whatif) == 6 * 3


def test_the_bias_is_no_error():
    (row,) = measure(snapshot(bias=True))["outputs"]
    assert row["exact"]
    assert row["realised2"] < 1e-9 * row["ref2"]


def test_sampling_is_recorded():
    index = torch.arange(32)
    rows = by_role(measure(snapshot(rows=32, n_rows=320, row_index=index))["tensors"])
    assert {row["sampled_frac"] for role, row in rows.items() if role[0] in "xg"} == {0.1}
    assert {row["n_clusters"] for role, row in rows.items() if role[0] in "xg"} == {1}
    assert rows["w_fwd"]["sampled_frac"] == 1.0


def test_sampled_features_keep_whole_blocks_of_both_directions():
    s = snapshot(max_features=32)
    assert s.weight.rows.shape == (32, K)
    assert s.weight.columns.shape == (OUT, 32)
    tables = measure(s)
    assert tables["outputs"][0]["exact"]
    rows = by_role(tables["tensors"])
    assert rows["w_fwd"]["n"] == 32 * K
    assert rows["w_dgrad"]["n"] == OUT * 32
    assert rows["w_fwd"]["sampled_frac"] == pytest.approx(32 / OUT)
    assert rows["g_dgrad"]["n"] == ROWS * OUT


def test_non_finite_values_are_an_event():
    s = snapshot()
    s.x[0, 0] = float("nan")
    events = measure(s)["events"]
    assert {event["kind"] for event in events} == {"nonfinite"}
    assert "layers.0.up x_fwd: 1 non-finite elements, 1 blocks left out" in [event["detail"] for event in events]


def test_the_last_exact_recipe_is_remembered():
    recipes: dict[tuple[str, str], tuple[str, str]] = {}
    list(measure_step([snapshot()], AgentConfig(), recipes=recipes, history=WeightHistory()))
    assert recipes == {("layers.0.up", "train"): ("none", "none")}


def test_gradient_errors_come_from_the_operands_of_each_gradient_product():
    s = snapshot()
    rows = {(row["gemm"], row["component"]): row for row in measure(s)["gradients"]}
    assert set(rows) == {(gemm, c) for gemm in ("wgrad", "dgrad") for c in ("total", "scale", "deadzone", "grid")}
    x, g, w = s.x.double(), s.gradient, s.weight.rows.double()
    assert g is not None

    def q(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return mxprobe_kernels.quantize_dequantize(tensor, dim=dim)[0].double()

    for gemm, exact, rounded in (
        ("wgrad", g.double().T @ x, q(g, 0).T @ q(s.x, 0)),
        ("dgrad", g.double() @ w, q(g, 1) @ q(s.weight.rows, 0)),
    ):
        row = rows[gemm, "total"]
        assert row["ref2"] == pytest.approx(float((exact**2).sum()), rel=1e-9)
        assert row["err2"] == pytest.approx(float(((rounded - exact) ** 2).sum()), rel=1e-6)
        assert row["n_clusters"] == {"wgrad": ROWS // 32, "dgrad": ROWS}[gemm]
    assert "gradients" not in measure(snapshot(gradient=None))
    assert {row["gemm"] for row in measure(snapshot(with_weights=False))["gradients"]} == {"wgrad"}


MANY = 1024


def heavy_tailed(columns: int, seed: int) -> torch.Tensor:
    """[MANY, columns] of which few rows hold most of the energy, in one channel."""
    generator = torch.Generator().manual_seed(seed)
    scale = (1.2 * torch.randn(MANY, 1, generator=generator)).exp()
    x = torch.randn(MANY, columns, generator=generator) * scale
    x[:, 3] *= scale[:, 0]
    return x


def sampled(x: torch.Tensor, g: torch.Tensor, seed: int) -> Snapshot:
    """What a call on x copies where a CPU measures it."""
    chosen = choose_rows(x, max_rows=512, out_features=OUT, seed=seed)
    assert chosen.index is not None
    whole = snapshot()
    y = x @ whole.weight.rows.T
    made = replace(
        whole,
        module=str(seed),  # of which the rows of G are drawn
        n_rows=MANY,
        row_index=chosen.index,
        x=x[chosen.index],
        y=y[chosen.index],
        y_watched=y[chosen.index],
        n_tile_rows=chosen.n_tile_rows,
        singles=chosen.singles,
        gradient=None,
    )
    made.add_gradient(g)
    return made


def test_sums_over_sampled_rows_are_those_over_all_but_for_the_draw():
    x, g = heavy_tailed(K, 1), heavy_tailed(OUT, 2)
    whole = snapshot()
    full = measure(replace(whole, n_rows=MANY, x=x, y=x @ whole.weight.rows.T, gradient=g))
    truth = by_role(full["tensors"])
    of_whatif = next(r for r in full["whatif"] if r["role"] == "x_fwd" and r["correction"] == "mbs:32")
    wanted = [truth["x_fwd"]["sum_e2"], truth["x_fwd"]["out_e2"], truth["x_fwd"]["n_zeroed"]]
    wanted += [truth["g_dgrad"]["sum_dz2"], truth["w_fwd"]["out_ref2"], of_whatif["out_e2"]]
    wanted += [full["outputs"][0]["ref2"], full["blocks"][0]["n_blocks"]]
    draws: list[list[float]] = []
    for seed in range(40):
        s = sampled(x, g, seed)
        made = measure(s, whatifs=("mbs:32",))
        rows = by_role(made["tensors"])
        assert all(identity_error(row) < IDENTITY_TOLERANCE for row in rows.values())
        assert rows["g_wgrad"]["n"] == 128 * OUT
        assert rows["x_fwd"]["n_clusters"] >= 64
        assert s.singles is not None
        assert s.singles_of_gradient is not None
        w_x, w_g = s.singles.drawn_weight, s.singles_of_gradient.drawn_weight
        out = next(r for r in made["whatif"] if r["role"] == "x_fwd")["out_e2"]
        values = [rows["x_fwd"]["sum_e2"] * w_x, rows["x_fwd"]["out_e2"] * w_x, rows["x_fwd"]["n_zeroed"] * w_x]
        values += [rows["g_dgrad"]["sum_dz2"] * w_g, rows["w_fwd"]["out_ref2"] * w_x, out * w_x]
        values += [made["outputs"][0]["ref2"] * w_x, made["blocks"][0]["n_blocks"] * w_x]
        draws.append(values)
    found = torch.tensor(draws, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64)
    assert float((found.mean(0) - 1).abs().max()) < 0.05
    assert float(found.std(0).max()) < 0.15


def test_blocks_at_the_edge_of_a_shard_are_counted_as_blocks_are():
    x, g = heavy_tailed(K, 1), heavy_tailed(OUT, 2)
    shards = Placement(in_features=Shard(1, 5), out_features=Shard(1, 5))  # the second begins within a block
    rows = by_role(measure(replace(sampled(x, g, 0), placement=shards))["tensors"])
    assert rows["x_fwd"]["n_edge_blocks"] == 0
    assert rows["g_dgrad"]["n_edge_blocks"] == pytest.approx(rows["g_dgrad"]["n_blocks"], abs=1)


def test_wgrad_takes_whole_tiles_of_the_same_tokens():
    s = sampled(heavy_tailed(K, 1), heavy_tailed(OUT, 2), 3)
    assert s.row_index is not None
    tiles = s.tiled(s.row_index)
    assert torch.equal(tiles.reshape(-1, 32) - tiles[::32, None], torch.arange(32).expand(len(tiles) // 32, 32))
    assert s.gradient is not None
    assert torch.equal(s.tiled(s.gradient), heavy_tailed(OUT, 2)[tiles])
    assert torch.equal(s.tiled(s.x), heavy_tailed(K, 1)[tiles])


def test_rows_joined_from_two_calls_count_what_they_stand_for():
    x, g = heavy_tailed(K, 1), heavy_tailed(OUT, 2)
    s, decode = sampled(x, g, 0), snapshot(rows=3)
    s.append_rows(decode)
    weights = s.row_weights()
    assert weights is not None
    assert s.x.shape[0] == s.y.shape[0] == len(weights) == 128 + 3
    assert float(weights[-3:].unique()) == pytest.approx(float(weights[120]))  # one row each, as the certain ones
