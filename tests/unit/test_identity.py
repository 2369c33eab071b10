"""Ranks' rows added: every part once, different layers never; and how the agent names them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from torch import nn

from mxprobe.attribution.rank_copies import distinct
from mxprobe.attribution.ratios import sums_of, totals
from mxprobe.checks.measures import OperandMeasures
from mxprobe.measuring.adapters.module_names import named_modules
from mxprobe.measuring.adapters.placement import Placement, Shard
from mxprobe.schema import Role
from mxprobe.trace import Trace, TraceWriter, open_trace
from mxprobe.trace.name_conflicts import conflicting


def row(rank: int, role: str, placement: str | None, *, x2: float = 1.0, out: float = 1.0) -> dict[str, object]:
    place = {"step": 1, "micro_step": 0, "module": "m", "role": role, "phase": "train"}
    return {**place, "placement": placement, "rank": rank, "n": 4, "sum_x2": x2, "out_e2": out, "amax": 2.0}


def added(rows: list[dict[str, object]]) -> dict[str, float]:
    (total,) = totals(pd.DataFrame(rows), ["module", "role"]).to_dict("records")
    return {str(name): value for name, value in total.items()}


def test_a_weight_that_every_data_parallel_rank_has_counts_once_and_each_product_of_it():
    total = added([row(rank, "w_fwd", f" | tokens=r{rank}") for rank in range(4)])
    assert (total["n"], total["sum_x2"], total["out_e2"]) == (4, 1.0, 4.0)


def test_shards_add_up():
    total = added([row(rank, "x_fwd", f"tokens=r{rank}") for rank in range(4)])
    assert (total["n"], total["sum_x2"]) == (16, 4.0)


def test_a_whole_product_that_several_ranks_compute_counts_once():
    total = added([row(rank, "x_fwd", "tokens=r0") for rank in range(2)])
    assert (total["n"], total["out_e2"]) == (4, 1.0)


@pytest.mark.parametrize("placement", [None, ""])
def test_rows_that_say_nothing_are_added(placement: str | None):
    assert added([row(rank, "x_fwd", placement) for rank in range(2)])["sum_x2"] == 2.0


def test_a_rank_by_itself_has_all_its_rows():
    frame = pd.DataFrame([row(rank, "w_fwd", " | tokens=r0") for rank in range(2)])
    assert distinct(frame, ["module", "rank"]) is frame
    assert totals(frame, ["rank", "role"])["sum_x2"].to_list() == [1.0, 1.0]


def test_the_lowest_rank_that_measured_a_step_counts_for_it():
    rows = [row(0, "w_fwd", ""), row(1, "w_fwd", " | tokens=r1"), {**row(1, "w_fwd", " | tokens=r1"), "step": 2}]
    assert added(rows)["sum_x2"] == 2.0


def test_a_placement_says_what_is_its_own_first():
    place = Placement("r0", out_features=Shard(1, 2), x_tokens=Shard(1, 2))
    assert place.words(Role.X_FWD) == "tokens=r0:1/2 | out=1/2"
    assert place.words(Role.W_FWD) == "out=1/2 | tokens=r0:1/2"
    assert place.words(Role.G_DGRAD) == "tokens=r0 out=1/2"
    assert Placement().words(Role.G_WGRAD) == ""


@pytest.mark.parametrize(
    ("index", "length", "blocks"),
    [(0, 64, 0), (0, 40, 3), (1, 40, 6), (2, 40, 6), (4, 40, 0)],
    ids=["aligned", "cut short", "shifted", "shifted by 80", "last, on a boundary"],
)
def test_blocks_that_one_gpu_would_form_otherwise_are_counted(index: int, length: int, blocks: int):
    place = Placement(in_features=Shard(index, 5))
    assert place.edge_blocks(Role.X_FWD, length, 3, 32) == blocks
    assert place.edge_blocks(Role.G_DGRAD, length, 3, 32) == 0


def modules(*rows: tuple[int, str, str, list[int]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["rank", "module", "class_name", "shape"])


def test_two_layers_of_one_name_are_kept_apart():
    table = modules((0, "0", "Linear", [8, 8]), (1, "0", "Linear", [4, 8]), (2, "0", "Conv", [8, 8]))
    assert conflicting(table) == {"0"}


def test_the_reader_keeps_them_apart_and_says_so(tmp_path: Path):
    with TraceWriter(tmp_path / "run.mxprobe", {}) as writer:
        for rank in range(2):
            named = {"module": ["0", "1"], "class_name": ["Linear"] * 2, "shape": [[8 * (rank + 1), 8 + rank], [4, 4]]}
            writer.append("modules", {"time_ns": [1, 1], **named}, rank=rank)
            writer.append("outputs", {"step": [1, 1], "module": ["0", "1"], "ref2": [1.0, 1.0]}, rank=rank)
    trace = open_trace(tmp_path / "run.mxprobe")
    apart = ["0 (rank 0)", "0 (rank 1)", "1"]
    assert sorted(set(trace.outputs()["module"])) == apart
    assert sorted(set(trace.modules()["module"])) == apart
    assert (
        sorted({name for chunk in trace.chunks("outputs", ("module",)) for name in chunk["module"].to_pylist()})
        == apart
    )
    assert any("0 is not one module" in problem for problem in trace.problems)


def test_shards_of_one_weight_are_one_module():
    assert not conflicting(modules((0, "up", "Linear", [8, 8]), (1, "up", "Linear", [8, 8])))
    assert not conflicting(modules(*((r, "head", "Linear", [6 if r == 2 else 8, 8]) for r in range(3))))


class Block(nn.Module):
    def __init__(self, **numbers: int) -> None:
        super().__init__()
        for name, number in numbers.items():
            setattr(self, name, number)
        self.up = nn.Linear(4, 4)


def names(*roots: nn.Module) -> list[str]:
    return [name for name, module in named_modules(list(roots)) if isinstance(module, nn.Linear)]


def chunk(*blocks: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    return model


@pytest.mark.parametrize("numbers", [{"layer_number": 5}, {"layer_idx": 4}, {"layer_id": 4}])
def test_a_layer_is_called_by_its_index_in_the_whole_model(numbers: dict[str, int]):
    assert names(chunk(Block(**numbers))) == ["layers.4.up"]


def test_transformers_keeps_the_number_in_the_attention():
    layer = nn.Module()
    layer.self_attn = Block(layer_idx=7)
    assert names(chunk(layer)) == ["layers.7.self_attn.up"]


def test_chunks_of_one_model_need_no_prefix_and_models_of_one_kind_do():
    first, second = chunk(Block(layer_number=1)), chunk(Block(layer_number=3))
    assert names(first, second) == ["layers.0.up", "layers.2.up"]
    assert names(chunk(Block(layer_number=1)), chunk(Block(layer_number=1))) == [
        "Module.layers.0.up",
        "Module_2.layers.0.up",
    ]


def test_numbers_that_do_not_tell_layers_apart_are_not_used():
    assert names(chunk(Block(layer_idx=3), Block(layer_idx=3))) == ["layers.0.up", "layers.1.up"]
    assert names(chunk(Block(layer_idx=3), Block())) == ["layers.0.up", "layers.1.up"]


def test_experts_are_called_by_their_index_among_all():
    layer = nn.Module()
    layer.local_expert_indices = [6, 7]
    layer.experts = nn.Module()
    layer.experts.local_experts = nn.ModuleList([Block(), Block()])
    assert names(layer) == ["experts.local_experts.6.up", "experts.local_experts.7.up"]


def test_a_tied_module_is_named_once():
    linear = nn.Linear(2, 2)
    assert names(nn.Sequential(linear, linear)) == ["0"]


def test_a_table_read_piece_by_piece_counts_every_part_once(tmp_path: Path):
    with TraceWriter(tmp_path / "run.mxprobe", {}) as writer:
        for rank in range(3):
            rows = [row(rank, "w_fwd", f" | tokens=r{rank}"), row(rank, "x_fwd", f"tokens=r{rank}")]
            writer.append(
                "tensors", {name: [each[name] for each in rows] for name in rows[0] if name != "rank"}, rank=rank
            )
    trace = open_trace(tmp_path / "run.mxprobe")
    read = sums_of(trace, "tensors", ("module", "role"), ("sum_x2", "out_e2")).set_index("role")
    assert read["sum_x2"].to_dict() == {"w_fwd": 1.0, "x_fwd": 3.0}
    assert read["out_e2"].to_dict() == {"w_fwd": 3.0, "x_fwd": 3.0}
    by_rank = sums_of(trace, "tensors", ("rank", "role"), ("sum_x2",))
    assert by_rank["sum_x2"].to_list() == [1.0] * 6


def test_rows_without_a_placement_are_no_copies_beside_rows_with_one(tmp_path: Path):
    """Fused experts say nothing of parts; a Linear of the same model does."""
    rows = [row(rank, "x_fwd", f"tokens=r{rank}") for rank in range(2)]
    rows += [{**row(rank, "x_fwd", ""), "module": "experts"} for rank in range(2)]
    assert totals(pd.DataFrame(rows), ["module"])["sum_x2"].to_list() == [2.0, 2.0]
    trace = recorded(tmp_path, "tensors", rows)
    assert sums_of(trace, "tensors", ("module",), ("sum_x2", "out_e2"))["sum_x2"].to_list() == [2.0, 2.0]


def test_phases_and_corrections_have_lowest_ranks_of_their_own(tmp_path: Path):
    one, other = row(0, "w_fwd", " | tokens=r0"), row(1, "w_fwd", " | tokens=r1")
    phases = recorded(tmp_path / "a", "tensors", [one, {**other, "phase": "rollout"}])
    assert sums_of(phases, "tensors", ("role",), ("sum_x2",))["sum_x2"].to_list() == [2.0]
    of = [{**one, "correction": "of:1.0"}, {**other, "correction": "of:1.0"}, {**other, "correction": "had:32"}]
    rows = [{name: value for name, value in each.items() if name not in ("sum_x2", "amax")} for each in of]
    whatif = recorded(tmp_path / "b", "whatif", rows)
    assert sums_of(whatif, "whatif", ("correction",), ("n",)).set_index("correction")["n"].to_dict() == {
        "of:1.0": 4,
        "had:32": 4,
    }


def test_limits_count_copies_once(tmp_path: Path):
    rows = [row(rank, "x_fwd", f"tokens=r{rank // 2 * 2}") for rank in range(3)]
    rows = [{**each, "sum_e2": 0.4 if each["rank"] == 2 else 0.1} for each in rows]
    trace = recorded(tmp_path, "tensors", rows)
    assert [each.value for each in OperandMeasures(trace, ()).of("max_nmse")] == [pytest.approx(0.25)]


def recorded(directory: Path, table: str, rows: list[dict[str, object]]) -> Trace:
    directory.mkdir(exist_ok=True)
    with TraceWriter(directory / "run.mxprobe", {}) as writer:
        for each in rows:
            columns = {name: [value] for name, value in each.items() if name != "rank"}
            writer.append(table, columns, rank=int(str(each["rank"])))
    return open_trace(directory / "run.mxprobe")
